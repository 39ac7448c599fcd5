"""The networks of `user_networks.py` as rows: what is run and where the bar is. `quick` shrinks the work, not the table."""

from dataclasses import dataclass
from typing import Any, Literal

from rows import CORES, Against, Config, Row, shortened

MethodName = Literal["fedavg", "fedme"]
METHODS: tuple[MethodName, ...] = ("fedavg", "fedme")
BATCH, EPOCHS, MOMENTUM = 20, 2, 0.9
LR = {"sgd": 0.01, "adamw": 0.001}
VAL = 0.2
EVEN = 0.97  # a bar of 1 is met from here on: timings are not more exact

Work = Literal["cifar10", "synthetic", "shakespeare"]


@dataclass(frozen=True)
class UserNetwork:
    """One network: the plain loop's seconds divided by ours must reach `bar`; `reach` and `peak` are what to reach for."""

    name: str
    about: str
    spec: str
    bar: float
    reach: float | None = None
    peak: float | None = None  # share of the sgemm peak
    data: Work = "cifar10"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    options: tuple[tuple[str, Any], ...] = ()
    flower: bool = False  # Flower's simulation is compared too
    repeatable: bool = True  # False: the sides draw different dropout masks
    epochs: int = EPOCHS  # the slowest networks have fewer, so that the whole benchmark takes half an hour

    def config(self, method: MethodName, rounds: int, quick: bool = False, path: str = "auto") -> Config:
        """The experiment. The engine is as it is by default, with as many workers as the plain loop has processes."""
        data, partition = division(self.data, quick)
        optimizer = {"momentum": MOMENTUM} if self.optimizer == "sgd" else {"optimizer": self.optimizer}
        return {
            "method": {"name": method},
            "rounds": rounds,
            "data": data,
            "partition": partition,
            # The plain loop evaluates with the averaged running statistics of batch normalisation; so do we.
            "models": {"pool": [{"name": f"user_networks:{self.spec}"} | dict(self.options)], "update_bn": False},
            "train": {"epochs": self.epochs, "batch": BATCH, "lr": LR[self.optimizer], **optimizer},
            "engine": {"workers": CORES, "path": path},
        }

    def met(self, ratio: float) -> bool:
        """Whether the bar is reached."""
        return ratio >= (EVEN if self.bar == 1.0 else self.bar)


def division(data: Work, quick: bool) -> tuple[Config, Config]:
    """The `data` and `partition` tables: 3,800 images over 20 clients, 60 features over 100 clients, or roles of Shakespeare.

    `limit` is for images the size of the pool that clients draw from, elsewhere the samples of one client.
    """
    if data == "cifar10":
        sizes = {"clients": 4, "least": 20, "most": 120, "steps": 12} if quick else {"least": 40, "most": 340, "steps": 190}
        pool = {"name": "cifar10", "val": VAL, "limit": 500 if quick else 5000}
        return pool, {"name": "unequal", "val": VAL, "batch": BATCH, **sizes}
    if data == "synthetic":
        return {"name": "synthetic", "users": 4 if quick else 100, "val": VAL, "limit": 80}, {"name": "natural"}
    return (
        {"name": "shakespeare", "val": VAL, "test": 0.2, "limit": 50},
        {"name": "natural", "clients": 4 if quick else 20, "min_samples": 1000},
    )


NETWORKS: tuple[UserNetwork, ...] = (
    UserNetwork("mlp-sequential", "MLP 3072-128-10, nn.Sequential", "mlp_sequential", 2.0, 2.5),
    UserNetwork("mlp-class", "MLP 3072-128-10, class around nn.Sequential", "MLPClass", 2.0, 2.5),
    UserNetwork("mlp", "MLP 3072-128-10, functional forward", "MLP", 2.0, 2.5, flower=True),
    UserNetwork("mlp-batchnorm", "MLP with BatchNorm1d", "MLPBatchNorm", 1.8, 2.5),
    UserNetwork("mlp-layernorm", "MLP with LayerNorm", "MLPLayerNorm", 1.8, 2.5),
    UserNetwork("mlp-gelu", "MLP with GELU", "MLPGelu", 1.8, 2.5),
    UserNetwork("mlp-dropout", "MLP with Dropout", "MLPDropout", 1.8, 2.5, repeatable=False),
    UserNetwork("mlp-small", "MLP 60-20-10, 100 clients", "SmallMLP", 20.0, 40.0, data="synthetic"),
    UserNetwork("lenet", "LeNet-like CNN, functional forward", "LeNet", 2.5, 3.0, flower=True),
    UserNetwork("strided", "two strided convolutions", "StridedCNN", 1.3, 1.5, 0.65),
    UserNetwork("resnet8", "ResNet-8 with BatchNorm", "ResNet8", 1.4, 1.7, 0.75, flower=True, epochs=1),
    UserNetwork(
        "resnet8-groupnorm", "ResNet-8 with GroupNorm", "ResNet8", 1.4, 1.7, 0.75, options=(("norm", "group"),), epochs=1
    ),
    UserNetwork("avgpool", "CNN with average pooling", "AveragePoolCNN", 1.4, 1.7, 0.75, epochs=1),
    UserNetwork("mobilenet", "depthwise-separable convolutions", "MobileNet", 1.5, 2.5, epochs=1),
    UserNetwork("vit", "ViT, 64 tokens of width 64, 2 layers", "ViT", 1.3, 1.7, epochs=1),
    UserNetwork("vit-encoder", "the same with nn.TransformerEncoderLayer", "EncoderViT", 1.3, 1.7, epochs=1),
    UserNetwork("lstm", "LSTM, 2 layers of 256, Shakespeare", "CharLSTM", 1.2, 1.5, data="shakespeare", epochs=1),
    UserNetwork("custom-function", "MLP with a custom autograd.Function", "CustomFunction", 1.0),
    UserNetwork("branch", "MLP with `if x.mean() > 0` in its forward", "DataDependent", 1.0),
    UserNetwork("tied", "MLP with tied weights", "TiedWeights", 1.0),
    UserNetwork("mlp-adamw", "MLP 3072-128-10, functional forward, AdamW", "MLP", 2.0, 2.5, optimizer="adamw"),
    UserNetwork("lenet-adamw", "LeNet-like CNN, functional forward, AdamW", "LeNet", 2.5, 3.0, optimizer="adamw"),
)

FORMS = ("mlp-sequential", "mlp-class", "mlp")  # the same network in three forms, which must take the same time
FORMS_BAR = 1.1


def flower_rows(quick: bool = False) -> list[Row]:
    """FedAvg against Flower's simulation, which plays its rounds by itself. The bars are those against the plain loop.

    All test images are used: batches come in another order at the peer, and accuracies of few images would differ.
    """
    found = []
    for network in NETWORKS:
        if network.flower:
            config = network.config("fedavg", 9, quick)
            config["data"] = {key: value for key, value in config["data"].items() if key != "limit" or quick}
            against = (Against("flower", network.bar, network.reach),)
            row = Row(f"networks-{network.name}-flower", f"FedAvg {network.about}", config, against, model=network.spec)
            found.append(shortened(row) if quick else row)
    return found
