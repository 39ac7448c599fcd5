# Written by tools/write_api_stubs.py from the dataclasses of the methods; do not edit.
import collections.abc
import typing

import fedme.methods.fedme.adoption
from fedme.api.learner import Learner

class ExperimentSettings(typing.TypedDict, total=False):
    # Tables may be given as dictionaries: train={"lr": 0.05}.
    name: str
    seed: int
    rounds: int
    evaluate_every: int
    evaluate_trained: bool
    checkpoint_every: int
    save: typing.Literal['all', 'none']
    log: typing.Union[typing.Literal['tensorboard', 'mlflow'], tuple[typing.Literal['tensorboard', 'mlflow'], ...]]
    data: collections.abc.Mapping[str, typing.Any]
    partition: collections.abc.Mapping[str, typing.Any]
    models: collections.abc.Mapping[str, typing.Any]
    train: collections.abc.Mapping[str, typing.Any]
    finetune: collections.abc.Mapping[str, typing.Any]
    privacy: collections.abc.Mapping[str, typing.Any]
    engine: collections.abc.Mapping[str, typing.Any]
    defence: collections.abc.Mapping[str, typing.Any]
    attack: collections.abc.Mapping[str, typing.Any]
    faults: collections.abc.Mapping[str, typing.Any]

class FedMe(Learner):
    """Clients of any architecture exchange models, learn mutually and keep the better model."""

    def __init__(
        self,
        *,
        clusters: int | collections.abc.Mapping[int, int] = ...,
        cluster_on: typing.Literal['logits', 'softmax'] = ...,
        tuning: bool = ...,
        mutual: bool = ...,
        clustering: bool = ...,
        adopt: str | collections.abc.Callable[[fedme.methods.fedme.adoption.Candidate], float] = ...,
        adopt_by: collections.abc.Mapping[str, str | collections.abc.Callable[[fedme.methods.fedme.adoption.Candidate], float]] = ...,
        order: typing.Literal['simultaneous', 'alternating'] = ...,
        shared: str | tuple[str, ...] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class FML(Learner):
    """A shared and a private model, of any architecture, learn from each other; only the shared one travels."""

    def __init__(
        self,
        *,
        alpha: float | tuple[float, float] = ...,
        beta: float | tuple[float, float] = ...,
        schedule: typing.Literal['linear', 'step'] = ...,
        shared: str | tuple[str, ...] = ...,
        loss: typing.Literal['convex', 'sum'] = ...,
        weighting: typing.Literal['uniform', 'samples'] = ...,
        optimizer_state: typing.Literal['keep', 'reset'] = ...,
        order: typing.Literal['simultaneous', 'alternating'] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class PFML(Learner):
    """Regularised mutual learning of a shared local model and a private auxiliary one."""

    def __init__(
        self,
        *,
        lam: float = ...,
        inner_steps: int = ...,
        inner_lr: float | None = ...,
        beta: float = ...,
        l2: float | tuple[float, float] = ...,
        aux: typing.Literal['persistent', 'anchored', 'reset'] = ...,
        train_all: bool = ...,
        shared: str | tuple[str, ...] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class Local(Learner):
    """Every client trains its own model on its own data."""

    def __init__(
        self,
        *,
        optimizer_state: typing.Literal['keep', 'reset'] = ...,
        patience: int | None = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class Centralized(Learner):
    """One model trained on the pooled data of all clients."""

    def __init__(
        self,
        *,
        patience: int | None = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class FedAvg(Learner):
    """Clients train copies of one model, the server averages them."""

    def __init__(
        self,
        *,
        weighting: typing.Literal['samples', 'uniform'] = ...,
        shared: str | tuple[str, ...] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class FedProx(Learner):
    """FedAvg whose clients are pulled back to the model they received."""

    def __init__(
        self,
        *,
        weighting: typing.Literal['samples', 'uniform'] = ...,
        shared: str | tuple[str, ...] = ...,
        mu: float = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class SCAFFOLD(Learner):
    """FedAvg whose clients correct every gradient by how their data differ from everybody's."""

    def __init__(
        self,
        *,
        server_lr: float = ...,
        weighting: typing.Literal['uniform', 'samples'] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class HypCluster(Learner):
    """Several global models; each client trains the one that fits it best."""

    def __init__(
        self,
        *,
        clusters: int = ...,
        shared: str | tuple[str, ...] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class Mapper(Learner):
    """Every client mixes a local and a global model in its own proportion."""

    def __init__(
        self,
        *,
        lambdas: tuple[float, ...] = ...,
        scale_global: bool = ...,
        shared: str | tuple[str, ...] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class APFL(Learner):
    """Every client deploys a mixture of its own model and the shared one, and learns how much of each."""

    def __init__(
        self,
        *,
        alpha: float = ...,
        adapt: typing.Literal['step', 'round', 'never'] = ...,
        weighting: typing.Literal['uniform', 'samples'] = ...,
        shared: str | tuple[str, ...] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class PFedMe(Learner):
    """Personal models tied to a global one by Moreau envelopes."""

    def __init__(
        self,
        *,
        lam: float = ...,
        inner_steps: int = ...,
        inner_lr: float | None = ...,
        beta: float = ...,
        l2: float = ...,
        train_all: bool = ...,
        shared: str | tuple[str, ...] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class Ditto(Learner):
    """Every client has a personal model that is pulled towards the model of FedAvg."""

    def __init__(
        self,
        *,
        lam: float = ...,
        personal_epochs: int | None = ...,
        weighting: typing.Literal['uniform', 'samples'] = ...,
        shared: str | tuple[str, ...] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class FedPer(Learner):
    """Clients share the lower layers of one network and keep the last ones to themselves."""

    def __init__(
        self,
        *,
        personal: tuple[str, ...] | None = ...,
        weighting: typing.Literal['samples', 'uniform'] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class FedRep(Learner):
    """Clients share a representation, and each client fits a head of its own to it before it trains the representation."""

    def __init__(
        self,
        *,
        personal: tuple[str, ...] | None = ...,
        weighting: typing.Literal['uniform', 'samples'] = ...,
        head_epochs: int = ...,
        body_epochs: int = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class LGFedAvg(Learner):
    """Clients learn representations of their own, by any architecture, and share the last layer."""

    def __init__(
        self,
        *,
        shared: tuple[str, ...] | None = ...,
        weighting: typing.Literal['samples', 'uniform'] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class FedBN(Learner):
    """Clients share everything but their layers with batch normalisation."""

    def __init__(
        self,
        *,
        weighting: typing.Literal['uniform', 'samples'] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class FedAMP(Learner):
    """Similar clients attract each other's models: the server mixes a model for every client to be pulled towards."""

    def __init__(
        self,
        *,
        alpha: float = ...,
        lam: float = ...,
        sigma: float = ...,
        shared: str | tuple[str, ...] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class FD(Learner):
    """Clients of any architecture share their mean outputs for samples of each class."""

    def __init__(
        self,
        *,
        gamma: float = ...,
        distance: typing.Literal['mse', 'cross-entropy'] = ...,
        weighting: typing.Literal['uniform', 'samples'] = ...,
        means: typing.Literal['training', 'trained'] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class FedProto(Learner):
    """Clients of any architecture share the mean features of their samples of each class."""

    def __init__(
        self,
        *,
        lam: float = ...,
        weighting: typing.Literal['samples', 'uniform'] = ...,
        means: typing.Literal['training', 'trained'] = ...,
        predict: typing.Literal['head', 'prototype'] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class FedDF(Learner):
    """One model per architecture; the server teaches each what all clients together say about unlabeled samples."""

    def __init__(
        self,
        *,
        distil_epochs: int = ...,
        distil_batch: int = ...,
        distil_lr: float = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class HeteroFL(Learner):
    """Clients train slices of one wide network, as wide as they can afford."""

    def __init__(
        self,
        *,
        masked: bool = ...,
        scalers: bool = ...,
        static_bn: bool = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...

class FedMD(Learner):
    """Clients of any architecture agree on their outputs for public data."""

    def __init__(
        self,
        *,
        public_samples: int = ...,
        public_epochs: int = ...,
        patience: int | None = ...,
        private_epochs: int = ...,
        digest_epochs: int = ...,
        digest_batch: int = ...,
        digest_loss: typing.Literal['mae', 'mse', 'kl'] = ...,
        **experiment: typing.Unpack[ExperimentSettings],
    ) -> None: ...
