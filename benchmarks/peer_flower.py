"""Flower's simulation: its FedAvg strategy, two Ray actors of one CPU each, clients that train as in its quickstart."""

import functools
import time
from collections.abc import Iterable
from typing import Any

import peer_flower as module  # what Ray is handed must come from a module: workers then keep the data between messages
import protocol
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import networks

ACTORS = 2
client_app = ClientApp()


@functools.cache
def data(path: str) -> protocol.Data:
    """The samples, read once in every actor."""
    return protocol.read(path)


@functools.cache
def client(path: str, index: int) -> tuple[Tensor, Tensor]:
    """The tensors of one client, made once in every actor."""
    mine = data(path).clients[index]
    return torch.from_numpy(mine.x), torch.from_numpy(mine.y)


@functools.cache
def network_of(model: str, weights: str) -> torch.nn.Module:
    """A network whose weights are replaced by those of every message, made once in every actor."""
    return networks.build(model, protocol.read_weights(weights))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """The local epochs of a client."""
    config: Any = message.content["config"]
    network = network_of(config["model"], config["weights"])
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = client(config["data"], int(context.node_config["partition-id"]))
    network.train()
    optimiser = torch.optim.SGD(network.parameters(), lr=config["lr"], momentum=config["momentum"])
    torch.manual_seed(1000 * int(config["server-round"]) + int(context.node_config["partition-id"]))  # repeatable batches
    steps = samples = 0
    loader = DataLoader(TensorDataset(x, y), batch_size=config["batch"], shuffle=True)
    for _ in range(config["epochs"]):
        for inputs, labels in loader:
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(network(inputs), labels).backward()
            optimiser.step()
            steps, samples = steps + 1, samples + len(labels)
    metrics = MetricRecord({"num-examples": len(y), "steps": steps, "samples": samples})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def totals(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Steps and samples of all clients together."""
    metrics: list[Any] = [reply["metrics"] for reply in replies]
    return MetricRecord(
        {name: sum(each[name] for each in metrics) for name in ("steps", "samples")} | {"clients": len(metrics)}
    )


class Timed(FedAvg):
    """The strategy as it is, with a clock around training."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0, train_metrics_aggr_fn=totals)
        self.began, self.seconds = 0.0, []

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        """The start of a round."""
        self.began = time.perf_counter()
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, *args: Any, **kwargs: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The end of a round."""
        result = super().aggregate_train(*args, **kwargs)
        self.seconds.append(time.perf_counter() - self.began)
        return result


def main() -> None:
    """Do the job on the command line."""
    job = protocol.job()
    samples = data(job.data)
    network = networks.build(job.model, protocol.read_weights(job.weights))
    server_app, strategy, last = ServerApp(), Timed(), {}

    @server_app.main()
    def run_on_server(grid: Grid, context: Context) -> None:
        files = {"model": job.model, "data": job.data, "weights": job.weights}
        optimiser = {"batch": job.batch, "lr": job.lr, "epochs": job.epochs, "momentum": job.momentum}
        settings = ConfigRecord(files | optimiser)
        rounds = job.warm + job.rounds
        last["result"] = strategy.start(grid, ArrayRecord(network.state_dict()), rounds, train_config=settings)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": ACTORS}}
    run_simulation(server_app, client_app, len(samples.clients), backend_config=resources)
    result = last["result"]
    network.load_state_dict(result.arrays.to_torch_state_dict())
    counted = result.train_metrics_clientapp[job.warm + job.rounds]
    if counted["clients"] != len(samples.clients):
        raise RuntimeError(f"only {counted['clients']} of {len(samples.clients)} clients answered in the last round")
    right = networks.accuracy(network.eval(), torch.from_numpy(samples.test.x), torch.from_numpy(samples.test.y))
    seconds = strategy.seconds[job.warm :]
    protocol.answer("flower", job.work, seconds, int(counted["steps"]), int(counted["samples"]), right)


if __name__ == "__main__":
    module.main()
