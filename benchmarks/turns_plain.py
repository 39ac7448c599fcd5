"""The plain loop: what anybody writes in PyTorch without a framework. Two processes of one thread train one client at a time.

Both sides begin with the same weights and train on the same batches. Samples, batches and the exchange of models are
prepared beforehand and are not timed; weights are in shared memory, so that processes need not send them.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing
import torch.nn.functional as F
import turns
from session import Session
from torch import Tensor, nn

from fedme.core.key import Key
from fedme.methods.fedme.exchange import lenders

PROCESSES = 2
Batches = Sequence[Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]


def train(network: nn.Module, x: Tensor, y: Tensor, batches: Batches, optimizer_of: Optimizer) -> None:
    """FedAvg's client."""
    network.train()
    optimizer = optimizer_of(network.parameters())
    for rows in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x[rows]), y[rows])
        loss.backward()
        optimizer.step()


def train_mutually(own: nn.Module, guest: nn.Module, x: Tensor, y: Tensor, batches: Batches, optimizer_of: Optimizer) -> None:
    """FedMe's client: each model learns the labels and imitates the other."""
    own.train(), guest.train()
    optimizers = [optimizer_of(network.parameters()) for network in (own, guest)]
    for rows in batches:
        inputs, labels = x[rows], y[rows]
        for optimizer in optimizers:
            optimizer.zero_grad()
        a, b = own(inputs), guest(inputs)
        loss = F.cross_entropy(a, labels) + divergence(b, a) + F.cross_entropy(b, labels) + divergence(a, b)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def divergence(peer: Tensor, own: Tensor) -> Tensor:
    """KL(peer || own)."""
    return F.kl_div(F.log_softmax(own, 1), F.softmax(peer.detach(), 1), reduction="batchmean")


@torch.no_grad()
def evaluate(network: nn.Module, x: Tensor, y: Tensor) -> tuple[float, int]:
    """The sum of the losses, and the number of right answers."""
    network.eval()
    parts = [(network(inputs), labels) for inputs, labels in zip(x.split(512), y.split(512), strict=True)]
    loss = sum(F.cross_entropy(out, labels, reduction="sum").item() for out, labels in parts)
    return loss, sum(int((out.argmax(1) == labels).sum()) for out, labels in parts)


def numbers(network: nn.Module) -> list[Tensor]:
    """The weights and running statistics of a network."""
    return [value for value in network.state_dict().values() if value.is_floating_point()]


@torch.no_grad()
def load(network: nn.Module, row: Tensor) -> nn.Module:
    """Put a row of numbers into a network."""
    slots = numbers(network)
    for slot, part in zip(slots, row.split([slot.numel() for slot in slots]), strict=True):
        slot.copy_(part.view_as(slot))
    return network


@torch.no_grad()
def save(network: nn.Module, row: Tensor) -> None:
    """Write the numbers of a network into a row."""
    torch.cat([value.flatten() for value in numbers(network)], out=row)


@dataclass
class Plain:
    """Everything that the processes share: they are forked when it is complete."""

    clients: list[str]
    train: list[tuple[Tensor, Tensor]]
    val: list[tuple[Tensor, Tensor]]
    test: list[tuple[Tensor, Tensor]]
    batches: list[list[Batches]]  # by round and client
    lenders: list[list[int]]  # FedMe: whose model a client gets as its guest, by round and client
    optimizer_of: Optimizer
    networks: tuple[nn.Module, nn.Module]  # own and guest: every process has copies of its own
    models: Tensor  # FedAvg: one row, the global model; FedMe: a row per client
    trained: Tensor  # a row per client; FedMe: own models, then guests
    t: int = 0

    def client(self, t: int, index: int) -> bool:
        """The round of one client; whether it adopts its guest."""
        batches, lender = self.batches[t][index], self.lenders[t][index] if self.lenders else None
        own, guest = self.networks
        if lender is None:
            train(load(own, self.models[0]), *self.train[index], batches, self.optimizer_of)
            save(own, self.trained[index])
            return False
        load(own, self.models[index]), load(guest, self.models[lender])
        train_mutually(own, guest, *self.train[index], batches, self.optimizer_of)
        save(own, self.trained[index]), save(guest, self.trained[len(self.clients) + index])
        return evaluate(guest, *self.val[index])[0] < evaluate(own, *self.val[index])[0]

    def round(self, pool: Any) -> None:
        """One round; the largest clients first, so that both processes end at the same time."""
        largest = sorted(range(len(self.clients)), key=lambda index: -len(self.train[index][1]))
        adopts = dict(pool.imap_unordered(_client, [(self.t, index) for index in largest]))
        if not self.lenders:
            sizes = torch.tensor([float(len(y)) for _, y in self.train])
            torch.matmul((sizes / sizes.sum())[None], self.trained, out=self.models)
        else:
            torch.matmul(self.shares(self.lenders[self.t], adopts), self.trained, out=self.models)
        self.t += 1

    def shares(self, chosen: list[int], adopts: dict[int, bool]) -> Tensor:
        """FedMe: every model is the mean of its trained copies; who adopts gets the model of the lender."""
        count = len(self.clients)
        copies = torch.cat((torch.eye(count), torch.zeros(count, count)), 1)
        for index, lender in enumerate(chosen):
            copies[lender, count + index] = 1.0
        copies /= copies.sum(1, keepdim=True)
        return copies[[chosen[index] if adopts[index] else index for index in range(count)]]

    def tested(self) -> dict[str, float]:
        """Loss and accuracy of the clients' models on all test samples."""
        rows = range(len(self.clients)) if self.lenders else [0] * len(self.clients)
        sums = [evaluate(load(self.networks[0], self.models[row]), *part) for row, part in zip(rows, self.test, strict=True)]
        total = sum(len(y) for _, y in self.test)
        return {"loss": sum(loss for loss, _ in sums) / total, "accuracy": sum(right for _, right in sums) / total}


def prepared(session: Session) -> Plain:
    """What an experiment needs: from the library only data, first weights, batches and who gets whose model."""
    settings, data = session.experiment.settings, list(session.federation.clients.values())
    names, root, schedule = [each.id for each in data], session.root, settings.train.batch_schedule()
    mutual = session.experiment.method_name == "fedme"
    deliveries = [session.method.deliver(session.task, session.server, name) for name in names]
    first = [each.own.module() for each in deliveries] if mutual else [deliveries[0].model.module()]
    models = torch.stack([torch.cat([value.flatten() for value in numbers(network)]) for network in first]).detach()
    batches, guests = [], []
    for t in range(settings.rounds):
        keys = [root.at("round", t, "client", name, "train", "batches") for name in names]
        batches.append([schedule.batches(len(each.train), key) for each, key in zip(data, keys, strict=True)])
        if mutual:
            drawn = lenders(dict.fromkeys(names, 0), None, root.at("round", t, "server", "exchange"))
            guests.append([names.index(str(drawn[name])) for name in names])
    parts = {
        name: [(getattr(each, name).inputs(), getattr(each, name).y) for each in data] for name in ("train", "val", "test")
    }
    return Plain(
        names,
        **parts,
        batches=batches,
        lenders=guests,
        optimizer_of=optimizer(settings.train),
        networks=(session.task.shared.build(Key(0)), session.task.shared.build(Key(0))),
        models=models.share_memory_(),
        trained=torch.zeros((2 if mutual else 1) * len(names), models.shape[1]).share_memory_(),
    )


def optimizer(settings: Any) -> Optimizer:
    """PyTorch's own optimizer, as the `train` table says."""
    if getattr(settings, "optimizer", "sgd") == "adamw":
        return lambda weights: torch.optim.AdamW(weights, settings.lr, weight_decay=settings.weight_decay)
    return lambda weights: torch.optim.SGD(weights, settings.lr, settings.momentum, weight_decay=settings.weight_decay)


plain: Plain


def _client(task: tuple[int, int]) -> tuple[int, bool]:
    return task[1], plain.client(*task)


def main() -> None:
    """Serve the job on the command line: a configuration."""
    global plain
    torch.set_num_threads(1)  # before anything is computed: forked processes must not inherit threads
    with Session.of(json.loads(sys.argv[1])["config"]) as session:
        plain = prepared(session)
    batches = [batch for of_client in plain.batches[0] for batch in of_client]
    steps = {"steps": len(batches), "samples": sum(map(len, batches))}
    with torch.multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        turns.serve(lambda: plain.round(pool), lambda: steps | plain.tested())


if __name__ == "__main__":
    main()
