"""Every method against its oracle (tests/fedme_oracles): the same weights after three rounds, in float64.

The library plays the rounds, and everything random in them is recorded: first weights, participants, and the batches of every
training. The oracle, plain torch loops that were written from the paper alone, is given the same.
"""

import functools
from collections import defaultdict

import pytest
import torch

from fedme.core.data import Arrays, ClientData, Schema, Split
from fedme.core.key import Key
from fedme.core.method import Member, Round, Task
from fedme.core.model import Arch, Model
from fedme.core.operations import Train
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.reference import one_by_one
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import run_round
from fedme.learning.training_settings import Training
from fedme.methods.apfl import APFL
from fedme.methods.ditto import Ditto
from fedme.methods.fd import FD
from fedme.methods.fedamp import FedAMP
from fedme.methods.fedbn import FedBN
from fedme.methods.feddf import FedDF
from fedme.methods.fedper import FedPer
from fedme.methods.fedproto import FedProto
from fedme.methods.fedrep import FedRep
from fedme.methods.heterofl import HeteroFL
from fedme.methods.lgfedavg import LGFedAvg
from fedme.methods.scaffold import SCAFFOLD
from fedme_oracles import (
    apfl,
    common,
    ditto,
    fd,
    fedamp,
    fedbn,
    feddf,
    fedper,
    fedproto,
    fedrep,
    heterofl,
    lg_fedavg,
    networks,
    scaffold,
)

ROUNDS, SIZES, CLASSES = 3, (10, 6, 11, 4), 3
MLP, DEEP, BN, CNN = (
    Arch.named(kind.__name__, kind) for kind in (networks.mlp, networks.deep_mlp, networks.bn_mlp, networks.cnn)
)
WIDTHS = (1.0, 0.5, 0.5, 0.25)


def unscaled(rate):
    """The network of the oracle with the same names, but without its scalers: those of the method take their place."""
    network = networks.scaled_mlp(rate)
    network.body[1] = network.body[4] = torch.nn.Identity()
    return network


SCALED, SCALED_CNN, UNSCALED = (
    tuple(Arch.named(f"{kind.__name__} {rate}", kind, rate=rate) for rate in WIDTHS)
    for kind in (networks.scaled_mlp, networks.scaled_cnn, unscaled)
)
ORACLE_NETWORKS = {arch: functools.partial(networks.scaled_mlp, rate) for arch, rate in zip(UNSCALED, WIDTHS, strict=True)}
INIT = Key(3).at("init")
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ORACLE_SGD = common.Sgd(0.1, 0.9, 0.01)


def federation(archs):
    """Clients of different sizes, and the task."""
    shape = (1, 6, 6) if archs[0] in (CNN, SCALED_CNN[0]) else (5,)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(sum(SIZES), *shape, generator=draw, dtype=torch.float64)
    source = Arrays(x, torch.randint(CLASSES, (sum(SIZES),), generator=draw))
    parts = [Split(source, rows) for rows in torch.arange(sum(SIZES)).split(list(SIZES))]
    data = {
        str(i): ClientData(str(i), part, part.take(torch.arange(2)), part.take(torch.arange(2))) for i, part in enumerate(parts)
    }
    members = {str(i): Member(str(i), arch, ("a", "b", "c")) for i, arch in enumerate(archs)}
    by_name = {arch.name: arch for arch in archs}
    schema = Schema(shape, ("a", "b", "c"))
    unlabeled = Split(
        Arrays(torch.randn(10, *shape, generator=draw, dtype=torch.float64), torch.zeros(10).long()), torch.arange(10)
    )
    return data, Task(schema, members, archs[0], lambda name, classes: by_name[name], unlabeled, dtype=torch.float64)


def state_of(model):
    return {name: value.clone() for name, value in {**model.params, **model.buffers}.items()}


class Played:
    """Rounds of a method, and the problem that an oracle must solve in the same way."""

    def __init__(self, method, archs, phases, execute=one_by_one):
        self.data, self.task = federation(archs)
        self.phases, self.t, root = phases, 0, Key(3)
        self.orders, self.participants = {}, []
        self.owner = {part.train.rows[0].item(): int(client) for client, part in self.data.items()}
        self.counts = defaultdict(int)
        self.execute = execute
        method.check(self.task)
        self.engine = InProcessEngine(method, self.task, self.data, root, self.recorded, update_bn=False)
        self.server = method.init_server(self.task, INIT)
        for self.t in range(ROUNDS):
            self.participants.append(set())
            self.server = run_round(method, self.task, self.engine, self.server, self.t, ROUNDS, root).server
        deliveries = {client: method.deliver(self.task, self.server, client) for client in self.data}
        done = self.engine.evaluate_models(deliveries, Round(ROUNDS - 1, ROUNDS))
        self.personal = [state_of(each.value.models["personal"]) for each in done.values()]
        first = [
            state_of(
                Model.init(
                    member.arch, INIT.at("shared") if type(method) is FedAMP else INIT.at("client", client), torch.float64
                )
            )
            for client, member in self.task.members.items()
        ]
        self.problem = common.Problem(
            [(part.train.inputs(), part.train.y) for part in self.data.values()],
            [ORACLE_NETWORKS.get(arch, functools.partial(arch.factory, **dict(arch.options))) for arch in archs],
            first,
            [sorted(each) for each in self.participants],
            self.orders,
            server=self.first_of_server(method, archs),
            classes=CLASSES,
            architectures=[arch.name for arch in archs],
            public=self.task.unlabeled.inputs(),
        )

    def first_of_server(self, method, archs):
        models = {arch.name: state_of(Model.init(arch, INIT.at("shared"), torch.float64)) for arch in archs}
        return models if type(method) is FedDF else models[archs[0].name]

    def recorded(self, ops, *more):
        for op in ops:
            if isinstance(op, Train) and op.data.source is self.task.unlabeled.source:
                order = op.batch_schedule.batches(len(op.data), op.key.at("batches"))
                self.orders[self.t, common.SERVER, op.models["student"].arch.name] = order
            elif isinstance(op, Train):
                client = self.owner[op.data.rows[0].item()]
                phase = self.phases[self.counts[self.t, client]]
                self.counts[self.t, client] += 1
                self.participants[-1].add(client)
                self.orders[self.t, client, phase] = op.batch_schedule.batches(len(op.data), op.key.at("batches"))
        return self.execute(ops, *more)


def agree(found, wanted, names=None):
    for name in wanted if names is None else names:
        if wanted[name].is_floating_point():
            assert torch.allclose(found[name], wanted[name], rtol=0, atol=1e-6), name
            assert (found[name] - wanted[name]).abs().max() < 1e-9, name  # far below: nothing is lost on the way


ONE, MANY = (MLP,) * 4, (MLP, DEEP, MLP, DEEP)
DISTIL = {"distil_epochs": 2, "distil_batch": 4, "distil_lr": 0.01}
LATE = {"knows_first": False}  # FedAMP's clients are mixed after their first reply
CASES = {
    "ditto": (Ditto, {"lam": 0.7}, ("shared", "personal"), ditto, {"lambda_": 0.7}, ONE),
    "ditto, by samples": (Ditto, {"weighting": "samples"}, ("shared", "personal"), ditto, {"weighting": "samples"}, ONE),
    "ditto, cnn": (Ditto, {}, ("shared", "personal"), ditto, {}, (CNN,) * 4),
    "ditto, batch normalisation": (Ditto, {}, ("shared", "personal"), ditto, {}, (BN,) * 4),
    "scaffold": (SCAFFOLD, {}, ("train",), scaffold, {}, ONE),
    "scaffold, half a step": (SCAFFOLD, {"server_lr": 0.5}, ("train",), scaffold, {"server_learning_rate": 0.5}, ONE),
    "scaffold, by samples": (SCAFFOLD, {"weighting": "samples"}, ("train",), scaffold, {"weighting": "samples"}, ONE),
    "scaffold, cnn": (SCAFFOLD, {}, ("train",), scaffold, {}, (CNN,) * 4),
    "scaffold, batch normalisation": (SCAFFOLD, {}, ("train",), scaffold, {}, (BN,) * 4),
    "apfl": (APFL, {}, ("train",), apfl, {}, ONE),
    "apfl, once a round": (APFL, {"adapt": "round"}, ("train",), apfl, {"alpha_moves": "round"}, ONE),
    "apfl, fixed": (APFL, {"adapt": "never", "alpha": 0.3}, ("train",), apfl, {"alpha_moves": "never", "alpha": 0.3}, ONE),
    "apfl, by samples": (APFL, {"weighting": "samples"}, ("train",), apfl, {"weighting": "samples"}, ONE),
    "apfl, cnn": (APFL, {}, ("train",), apfl, {}, (CNN,) * 4),
    "apfl, batch normalisation": (APFL, {}, ("train",), apfl, {}, (BN,) * 4),
    "fd": (FD, {}, ("train",), fd, {}, MANY),
    "fd, trained": (FD, {"means": "trained"}, ("train",), fd, {"collect": "after"}, MANY),
    "fd, trained, cross-entropy": (
        FD,
        {"means": "trained", "distance": "cross-entropy"},
        ("train",),
        fd,
        {"collect": "after", "distance": "cross_entropy"},
        MANY,
    ),
    "fd, strong, by samples": (
        FD,
        {"gamma": 3.0, "weighting": "samples"},
        ("train",),
        fd,
        {"gamma": 3.0, "weighting": "samples"},
        MANY,
    ),
    "fd, cross-entropy": (
        FD,
        {"distance": "cross-entropy"},
        ("train",),
        fd,
        {"distance": "cross_entropy"},
        MANY,
    ),
    "fd, cnn": (FD, {}, ("train",), fd, {}, (CNN,) * 4),
    "fd, batch normalisation": (FD, {"means": "trained"}, ("train",), fd, {"collect": "after"}, (BN,) * 4),
    "fedproto": (FedProto, {}, ("train",), fedproto, {"collect": "training"}, MANY),
    "fedproto, trained": (FedProto, {"means": "trained"}, ("train",), fedproto, {}, MANY),
    "fedproto, strong": (FedProto, {"lam": 5.0}, ("train",), fedproto, {"collect": "training", "lambda_": 5.0}, MANY),
    "fedproto, uniform": (
        FedProto,
        {"weighting": "uniform"},
        ("train",),
        fedproto,
        {"collect": "training", "weighting": "uniform"},
        MANY,
    ),
    "fedproto, cnn": (FedProto, {}, ("train",), fedproto, {"collect": "training"}, (CNN,) * 4),
    "fedproto, batch normalisation": (FedProto, {}, ("train",), fedproto, {"collect": "training"}, (BN,) * 4),
    "fedproto, trained, batch normalisation": (FedProto, {"means": "trained"}, ("train",), fedproto, {}, (BN,) * 4),
    "feddf": (FedDF, DISTIL, ("train",), feddf, {"server_learning_rate": 0.01}, MANY),
    "feddf, one architecture": (FedDF, DISTIL, ("train",), feddf, {"server_learning_rate": 0.01}, ONE),
    "feddf, cnn": (FedDF, DISTIL, ("train",), feddf, {"server_learning_rate": 0.01}, (CNN,) * 4),
    "feddf, batch normalisation": (FedDF, DISTIL, ("train",), feddf, {"server_learning_rate": 0.01}, (BN,) * 4),
    "heterofl": (HeteroFL, {}, ("train",), heterofl, {}, UNSCALED),
    "heterofl, scalers in the networks": (HeteroFL, {"scalers": False}, ("train",), heterofl, {}, SCALED),
    "heterofl, not masked": (
        HeteroFL,
        {"masked": False},
        ("train",),
        heterofl,
        {"masked": False, "head_by_class": False},
        UNSCALED,
    ),
    "heterofl, cnn": (HeteroFL, {"scalers": False}, ("train",), heterofl, {}, SCALED_CNN),
    "fedper": (FedPer, {}, ("train",), fedper, {}, ONE),
    "fedper, uniform": (FedPer, {"weighting": "uniform"}, ("train",), fedper, {"weighting": "uniform"}, ONE),
    "fedper, other layers": (FedPer, {"personal": ("body.0.",)}, ("train",), fedper, {"personal": ("body.0.",)}, ONE),
    "fedper, cnn": (FedPer, {}, ("train",), fedper, {}, (CNN,) * 4),
    "fedper, batch normalisation": (FedPer, {}, ("train",), fedper, {}, (BN,) * 4),
    "fedrep": (FedRep, {}, ("head", "body"), fedrep, {}, ONE),
    "fedrep, by samples": (
        FedRep,
        {"weighting": "samples", "head_epochs": 1},
        ("head", "body"),
        fedrep,
        {"weighting": "samples"},
        ONE,
    ),
    "fedrep, cnn": (FedRep, {"head_epochs": 2}, ("head", "body"), fedrep, {}, (CNN,) * 4),
    "fedrep, batch normalisation": (FedRep, {"head_epochs": 2}, ("head", "body"), fedrep, {}, (BN,) * 4),
    "lg-fedavg": (LGFedAvg, {}, ("train",), lg_fedavg, {}, ONE),
    "lg-fedavg, two bodies": (LGFedAvg, {}, ("train",), lg_fedavg, {}, MANY),
    "lg-fedavg, uniform": (LGFedAvg, {"weighting": "uniform"}, ("train",), lg_fedavg, {"weighting": "uniform"}, MANY),
    "lg-fedavg, cnn": (LGFedAvg, {}, ("train",), lg_fedavg, {}, (CNN,) * 4),
    "fedamp": (FedAMP, {"alpha": 0.3, "sigma": 2.0}, ("train",), fedamp, {"alpha": 0.3, "sigma": 2.0, **LATE}, ONE),
    "fedamp, weak pull": (FedAMP, {"alpha": 0.2, "lam": 0.1}, ("train",), fedamp, {"alpha": 0.2, "lambda_": 0.1, **LATE}, ONE),
    "fedamp, cnn": (FedAMP, {"alpha": 0.3}, ("train",), fedamp, {"alpha": 0.3, **LATE}, (CNN,) * 4),
    "fedamp, batch normalisation": (FedAMP, {"alpha": 0.3}, ("train",), fedamp, {"alpha": 0.3, **LATE}, (BN,) * 4),
    "fedbn": (FedBN, {}, ("train",), fedbn, {}, (BN,) * 4),
    "fedbn, by samples": (FedBN, {"weighting": "samples"}, ("train",), fedbn, {"weighting": "samples"}, (BN,) * 4),
    "fedbn, without batch normalisation": (FedBN, {}, ("train",), fedbn, {}, ONE),
    "fedbn, cnn": (FedBN, {}, ("train",), fedbn, {}, (CNN,) * 4),
}


def weights_of(server):
    """What the server holds, by name."""
    return state_of(server.model) if hasattr(server, "model") else {**server.params, **server.buffers}


def personal_of(after):
    """The personal models: APFL's are mixed with the newest shared model."""
    return after.kept.get("mixed_with_newest", after.personal)


FAST = [(case, 2, "auto") for case in CASES if "," not in case]  # the fast paths, once per method


@pytest.mark.parametrize(
    ("case", "cohort", "path"),
    [*((case, cohort, "reference") for case in CASES for cohort in (None, 2)), *FAST],
)
def test_three_rounds_as_the_oracle_computes_them(case, cohort, path):
    kind, settings, phases, oracle, given, archs = CASES[case]
    method = kind(train=Training(epochs=2, batch=4, cohort=cohort, **SGD), **settings)
    execute = one_by_one if path == "reference" else Dispatcher(path="auto")
    played = Played(method, archs, phases, execute)
    after = oracle.run(played.problem, oracle.Settings(sgd=ORACLE_SGD, **given))[-1]
    assert cohort is None or any(len(each) < len(SIZES) for each in played.participants)
    if kind is FD:
        for client, (means, counts) in after.kept["sent"].items():
            sent = played.server.sent[str(client)]
            assert (sent.means - means).abs().max() < 1e-9
            assert sent.counts.tolist() == counts.tolist()
    elif kind is FedDF:
        for name, wanted in after.server.items():
            agree(state_of(played.server.models[name]), wanted)
    elif kind is FedProto:
        assert (played.server.means - after.server).abs().max() < 1e-9
        assert played.server.known.tolist() == after.kept["classes_there"].tolist()
    elif after.server is not None:
        agree(weights_of(played.server), after.server)
    for i, (found, wanted) in enumerate(zip(played.personal, personal_of(after), strict=True)):
        # APFL's running statistics are a choice of ours (see its file)
        agree(found, wanted, [n for n in wanted if "running" not in n] if kind is APFL else None)
        if kind is APFL:
            assert abs(played.engine.states[str(i)].alpha - after.kept["alphas"][i]) < 1e-9
    before = oracle.run(played.problem, oracle.Settings(sgd=ORACLE_SGD, **given))[0]
    moved = max((before.personal[0][name] - after.personal[0][name]).abs().max() for name in after.personal[0])
    assert moved > 1e-3  # three rounds are not one
