"""pfl's own federated averaging: the simulated backend with PyTorch, one process, users' tensors in memory.

One thread: a plain PyTorch loop over networks this small is no faster with two.
"""

import time
from typing import Any

import numpy as np
import protocol
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

import networks


class Network(nn.Module):
    """A network with the two functions pfl asks for; it counts the steps and samples it is trained on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.steps = self.samples = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy."""
        self.steps += 1
        self.samples += len(y)
        return nn.functional.cross_entropy(self.inner(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """What pfl reports where it evaluates, which is before the rounds that are timed."""
        return {"accuracy": Weighted(float((self.inner(x).argmax(1) == y).sum()), len(y))}


class Clock(TrainingProcessCallback):
    """When every round ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *, model: Any) -> Metrics:
        """The start of the first round."""
        self.times.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """The end of a round."""
        self.times.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    """Do the job on the command line."""
    job = protocol.job()
    torch.set_num_threads(1)
    data = protocol.read(job.data)
    network = Network(networks.build(job.model, protocol.read_weights(job.weights)))
    users = {
        str(index): PyTorchTensorDataset((torch.from_numpy(each.x), torch.from_numpy(each.y)), user_id=str(index))
        for index, each in enumerate(data.clients)
    }
    federation = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    rounds, clock = job.warm + job.rounds, Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=rounds + 1, train_cohort_size=len(users), val_cohort_size=0
        ),
        backend=SimulatedBackend(federation, federation, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(local_batch_size=job.batch, local_num_epochs=1, local_learning_rate=job.lr),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    right = networks.accuracy(network.inner.eval(), torch.from_numpy(data.test.x), torch.from_numpy(data.test.y))
    seconds = np.diff(clock.times)[job.warm :].tolist()
    protocol.answer("pfl", job.work, seconds, network.steps // rounds, network.samples // rounds, right)


if __name__ == "__main__":
    main()
