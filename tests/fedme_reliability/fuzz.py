"""Real files and messages, damaged in ten thousand ways: each is valid, or refused in one line that names the place.

Every kind of input has originals, an action (what a command does with it, in this process) and a rule for what may be accepted:

* a configuration, a site's file: a configuration that is valid, written out and read again, is the same;
* people's data, publishers' files: whole samples, finite numbers, labels within the classes (these formats have no checksums);
* checkpoints, weights, saved models, summaries: what comes out is bit by bit what was written;
* records: every figure that is shown is a number, and the page of the report can be made;
* messages: what is read is written again as the same message, and passes the examination of replies or is refused by it.
"""

import contextlib
import functools
import gzip
import io
import json
import random
import shutil
import signal
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fedme import report
from fedme.artifacts import personal_model, unseen_clients
from fedme.config.experiment import load, parse, to_toml
from fedme.config.identity import digest
from fedme.core.data import Split
from fedme.core.foreign_text import one_line
from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.model import Model
from fedme.core.serialization import pack, unpack
from fedme.core.tree import leaves
from fedme.core.typed import TypedError
from fedme.datasets import DATASETS
from fedme.datasets.dataset import Dataset
from fedme.deployment import provisioning
from fedme.deployment.operator_folder import Federation, Settings as Operator
from fedme.deployment.site_data import client_data
from fedme.deployment.site_settings import Site
from fedme.deployment.site_state import PrivateState
from fedme.federation.in_process import InProcessEngine
from fedme.federation.reply_validation import MessageTypes, check_reply
from fedme.federation.round import run_round
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme.methods.local import State
from fedme.results import summary, views
from fedme.running import assembly, checkpoint, run
from fedme.running.progress import Display
from fedme.running.run_queue import USER_ERRORS
from fedme.running.weight_store import Store
from fedme_reliability.frame import Row
from fedme_reliability.mutate import of_bytes, of_json, of_lines, of_toml
from fedme_test_support import ARCHS, BODIES, DENSE, LINEAR, WIDE, clients, split, task

SECONDS = 60  # after which an action hangs; on a busy machine even a small one takes a few
MUTATORS = {".toml": of_toml, ".json": of_json, ".jsonl": of_lines}
SHARES = {"config": 4000, "data": 3000, "run": 2500, "message": 1500, "site": 1000}  # cases of each family: 12,000


class Hang(BaseException):
    """The action did not end in time."""


class Believed(AssertionError):
    """Something was accepted that is not what was written, or not valid."""


@dataclass
class Tally:
    """What became of the cases of a family."""

    tried: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """A file in a folder of its own, and what a user does with it; `act` raises Believed, or an error a user can mend."""

    name: str
    path: Path
    act: Callable[[], None]
    named: bool = True  # an error must name the file


def attempt(target: Target, original: bytes, number: int, tally: Tally, mutate: Callable[..., bytes] | None = None) -> None:
    """One case: damage, act, judge, mend."""
    draw = random.Random(f"{target.name} {number}")
    damaged = (mutate or MUTATORS.get(target.path.suffix, of_bytes))(original, draw)
    target.path.write_bytes(damaged)
    tally.tried += 1
    where = f"{target.name} #{number}"
    try:
        with within(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.act()
    except USER_ERRORS as error:
        tally.refused += 1
        said = one_line(str(error))  # as the command line shows it
        if not said or "Traceback" in said:
            tally.problems.append(f"{where}: says nothing: {said[:200]!r}")
        elif target.named and target.path.name not in said and target.path.parent.name not in said:
            tally.problems.append(f"{where}: does not name the file: {said[:200]!r}")
    except Hang:
        tally.problems.append(f"{where}: hangs")
    except Believed as error:
        tally.problems.append(f"{where}: believed: {error}")
    except Exception as error:
        tally.problems.append(f"{where}: {type(error).__name__}: {str(error)[:200]}")
    finally:
        target.path.write_bytes(original)


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Stop what takes longer."""

    def ring(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def believe(condition: bool, why: str) -> None:
    if not condition:
        raise Believed(why)


# Configurations ------------------------------------------------------------------------------------------------------------


def configs(folder: Path) -> list[Target]:
    """Experiments as people write them: presets filled in, and one with every table."""
    folder.mkdir(parents=True)
    words = ["defence.average=trimmed", "attack.clients=2", "data.public=10", "models.max_parameters=9999", "train.cohort=3"]
    found = []
    for name, more in (("digits-fedme", []), ("digits-fedavg", words)):
        path = folder / f"{name}.toml"
        experiment, _ = load(name, more)
        path.write_text(to_toml(experiment.plain()))
        found.append(Target(f"config {name}", path, functools.partial(_configure, path)))
    path = folder / "tiny.toml"
    path.write_text(to_toml(parse({**TINY, "data": {**TINY["data"], "public": 5}}).plain()))
    found.append(Target("config assembled", path, functools.partial(_assemble, path), named=False))  # data sets name keys
    return found


def _configure(path: Path) -> None:
    experiment, _ = load(path)
    plain = experiment.plain()
    believe(json.dumps(parse(plain).plain(), sort_keys=True) == json.dumps(plain, sort_keys=True), "reads differently again")


def _assemble(path: Path) -> None:
    experiment, _ = load(path)
    settings = experiment.settings
    if settings.models.assign == "best-local":  # that may take as long as somebody asks for
        return
    execute = assembly.executor(replace(settings.engine, threads=1, workers=1))
    prepared = assembly.prepare(experiment, assembly.gather(experiment), execute)
    believe(len(prepared.task.members) > 0, "a federation of nobody")


# Data ----------------------------------------------------------------------------------------------------------------------


def data(folder: Path) -> list[Target]:
    """One small file, or several, of every format."""
    draw = np.random.default_rng(0)
    found = []
    for name, write in {"csv": _csv, "tsv": _csv, "npz": _npz, "parquet": _parquet}.items():
        path = folder / name / f"samples.{name}"
        path.parent.mkdir(parents=True)
        write(path, draw)
        found.append(Target(f"data {name}", path, functools.partial(_own, path)))
    images = folder / "images" / "samples"
    for label in ("cat", "dog"):
        (images / label).mkdir(parents=True)
        for i, suffix in enumerate(("png", "jpg", "bmp", "webp", "tif")):
            _picture(images / label / f"{i}.{suffix}", draw)
    for path in sorted((images / "dog").iterdir()):
        found.append(Target(f"data {path.suffix[1:]}", path, functools.partial(_own, images)))
    found += _published(folder / "published", draw)
    return found


def _csv(path: Path, draw: Any) -> None:
    rows = [f"{a:.3f},{b},{'yes' if c else 'no'}" for a, b, c in zip(draw.random(12), "redgreenblue", [0, 1] * 6, strict=True)]
    text = "\n".join(["size,colour,label", *rows]) + "\n"
    path.write_text(text.replace(",", "\t") if path.suffix == ".tsv" else text)


def _npz(path: Path, draw: Any) -> None:
    np.savez_compressed(path, x=draw.random((12, 1, 4, 4)).astype("float32"), label=np.arange(12) % 2)


def _parquet(path: Path, draw: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    table = {"size": draw.random(12), "colour": list("redgreenblue"), "label": ["yes", "no"] * 6}
    pyarrow.parquet.write_table(pyarrow.table(table), path)


def _picture(path: Path, draw: Any) -> None:
    from PIL import Image

    Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)


def _own(path: Path) -> None:
    table = {"data": str(path)} | ({} if path.is_dir() else {"label": "label"})
    experiment = parse({"clients": {"a": table}, "data": {"name": "clients"}})
    _valid(assembly.gather(experiment).dataset)


def _valid(dataset: Dataset) -> None:
    rows = torch.cat([dataset.train, dataset.test])
    believe(len(dataset.train) > 0, "there are no samples")
    whole = Split(dataset.source, rows)
    x, y = whole.inputs(), whole.y
    for at, each in leaves(x):
        believe(bool(torch.isfinite(each).all()), f"{at} is not finite")
        believe(len(each) == len(y), "samples and labels differ in number")
    believe(int(y.min()) >= 0 and int(y.max()) < len(dataset.schema.classes), "a label is outside the classes")


def _published(folder: Path, draw: Any) -> list[Target]:
    """MNIST's, CIFAR's and LEAF's files in small."""
    found = []
    mnist = folder / "mnist" / "raw"
    mnist.mkdir(parents=True)
    for part, count in (("train", 20), ("t10k", 10)):
        for kind, values in (
            ("images-idx3", draw.integers(0, 256, (count, 28, 28))),
            ("labels-idx1", np.arange(count) % 10),
        ):
            body = (
                bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.astype("u1").tobytes()
            )
            packed = kind == "images-idx3"
            path = mnist / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(body) if packed else body)
            found.append(Target(f"data mnist {kind}", path, functools.partial(_load, "mnist", folder)))
    cifar = folder / "cifar-10-batches-bin"
    cifar.mkdir()
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        (cifar / name).write_bytes(b"".join(bytes([i % 10]) + draw.bytes(3072) for i in range(3)))
    found.append(Target("data cifar10", cifar / "data_batch_2.bin", functools.partial(_load, "cifar10", folder)))
    for part in ("train", "test"):
        for name in ("femnist", "shakespeare"):
            (folder / name / part).mkdir(parents=True, exist_ok=True)
        pixels = {u: {"x": draw.random((6, 784)).round(2).tolist(), "y": [1, 2, 3, 4, 5, 61]} for u in ("f0", "f1")}
        words = {u: {"x": ["a" * 80, "b" * 80], "y": ["c", "d"]} for u in ("HAMLET", "LEAR")}
        for name, users in (("femnist", pixels), ("shakespeare", words)):
            sizes = [len(each["y"]) for each in users.values()]
            content = {"users": list(users), "num_samples": sizes, "user_data": users}
            (folder / name / part / "all.json").write_text(json.dumps(content))
    for name in ("femnist", "shakespeare"):
        path = folder / name / "train" / "all.json"
        found.append(Target(f"data {name}", path, functools.partial(_load, name, folder), named=name == "femnist"))
    return found


def _load(name: str, root: Path) -> None:
    _valid(DATASETS[name]().load(root))


# Run directories -----------------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "digits", "limit": 60, "unlabeled": 10},
    "partition": {"name": "iid", "clients": 3},
    "models": {"pool": ["mlr", "dnn-8"]},
    "train": {"epochs": 1, "batch": 20},
    "engine": {"workers": 1},
}


class Killed(BaseException):
    """As good as a power cut."""


class Fused(Display):
    """A display that pulls the plug after so many rounds."""

    def __init__(self, rounds: int = -1) -> None:
        super().__init__(Console(quiet=True), quiet=True)
        self.left = rounds

    def advance(self, text: str = "") -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


def runs(folder: Path) -> list[Target]:
    """Finished runs and torn ones, of a method whose server keeps models and one whose clients do."""
    found = []
    for method in ("fedme", "fml"):
        config = {**TINY, "method": {"name": method}}
        whole, torn = folder / f"{method}-whole", folder / f"{method}-torn"
        run.start(parse(config | {"output": str(whole)}), Fused())
        with contextlib.suppress(Killed):
            run.start(parse(config | {"output": str(torn)}), Fused(2))
        found += _torn(method, torn)
        found += _whole(method, whole)
    return found


def _torn(method: str, folder: Path) -> list[Target]:
    experiment, _ = load(folder / "config.toml")
    plain = experiment.plain()
    prepared = assembly.prepare(experiment, assembly.gather(experiment), assembly.executor(experiment.settings.engine))

    def states() -> tuple[Any, list[torch.Tensor]]:
        now, _ = load(folder / "config.toml")
        store = Store(folder, 1 << 30)
        store.sweep = lambda needed: None  # type: ignore[method-assign]  # the files are used again
        try:
            file = checkpoint.load(folder, now.plain())
            if file is None:
                return None, []
            at = checkpoint.states(folder, store, file, now.method, prepared.archs, prepared.task.resolve)
            return at.header, [t for _, t in leaves((at.server, at.clients)) if isinstance(t, torch.Tensor)]
        finally:
            store.close()

    header, expected = states()

    def act() -> None:
        found, tensors = states()
        if (folder / "config.toml").read_bytes() != config:
            now, _ = load(folder / "config.toml")
            believe(digest(now.plain()) == digest(plain), "another configuration goes on")
        believe(found == header, "another place in the run")
        believe(len(tensors) == len(expected) and all(map(torch.equal, tensors, expected)), "other weights")

    config = (folder / "config.toml").read_bytes()
    segments = sorted((folder / "weights").glob("*.bin"))
    files = [folder / "checkpoint.json", folder / "checkpoint.json", folder / "config.toml", *segments]
    return [Target(f"run {method} torn {path.name}", path, act, named=path.suffix != ".bin") for path in files]


def _whole(method: str, folder: Path) -> list[Target]:
    client, experiment = folder / "clients" / "1", load(folder / "config.toml")[0]
    x = np.random.default_rng(1).integers(0, 17, (5, 1, 8, 8)).astype("float32")
    expected = personal_model.Personal(client, "model").logits(x)
    shown = summary.read(folder)
    target = folder.parent / "page.html"

    def predict() -> None:
        found = personal_model.Personal(personal_model.find(folder, "1"), "model").logits(x)
        believe(torch.equal(found, expected), "other predictions")

    def show() -> None:
        believe(summary.so_far(folder) == shown, "another summary")
        views.results(folder, "table", Console(file=io.StringIO()))

    def reported() -> None:
        views.clients(folder, "table", Console(file=io.StringIO()))
        report.write([folder], target)

    def offered() -> None:
        before = {offer.name: offer.model for offer in unseen_clients.load_offers(folder, experiment)}
        believe(before.keys() == models.keys(), "other offers")
        for name, model in before.items():
            pairs = zip(leaves(model), leaves(models[name]), strict=True)
            believe(all(torch.equal(a, b) for (_, a), (_, b) in pairs if isinstance(a, torch.Tensor)), "other offers")

    models = {offer.name: offer.model for offer in unseen_clients.load_offers(folder, experiment)}
    offer = next(iter(sorted(folder.glob("shared/*/model.safetensors"))), client / "model.safetensors")
    return [
        Target(f"run {method} model.safetensors", client / "model.safetensors", predict),
        Target(f"run {method} model.json", client / "model.json", predict),
        Target(f"run {method} summary.json", folder / "summary.json", show),
        Target(f"run {method} metrics.jsonl", folder / "metrics.jsonl", reported),
        Target(f"run {method} labels.json", folder / "labels.json", reported),
        Target(f"run {method} environment.json", folder / "environment.json", reported),
        Target(f"run {method} config.toml", folder / "config.toml", reported),
        Target(f"run {method} offer", offer, offered),
    ]


# Messages ------------------------------------------------------------------------------------------------------------------


def messages(folder: Path) -> list[Target]:
    """Replies of every method, as the wire carries them: text that names tensors, and the tensors."""
    folder.mkdir(parents=True)
    found = []
    for name in METHODS:
        for i, (phase, down, up) in enumerate(_heard(name)):
            tensors: dict[str, torch.Tensor] = {}
            path = folder / f"{name}-{i}.json"
            path.write_text(json.dumps(pack(up, tensors, "up")))
            found.append(Target(f"message {name} {i}", path, functools.partial(_read, name, phase, path, tensors, down), False))
    return found


class Listening(InProcessEngine):
    heard: list[Any]

    def exchange(self, downs: Any, when: Round) -> Any:
        answers = super().exchange(downs, when)
        client = next(iter(downs))
        self.heard.append((when, downs[client], answers[client].up))
        return answers


def _heard(name: str) -> list[Any]:
    method = METHODS[name](train=Training(epochs=1, batch=4, lr=0.05))
    setting = _task(name)
    engine = Listening(method, setting, clients(public=8), Key(0))
    engine.heard = []
    run_round(method, setting, engine, method.init_server(setting, Key(0).at("init")), 0, 1, Key(0))
    return [each for each in engine.heard if each[2] is not None]


def _task(name: str) -> Any:
    mixed = name in ("local", "fd", "feddf", "fedmd", "fml", "pfml", "fedme")
    return task((DENSE, WIDE, LINEAR) if mixed else (BODIES.get(name, LINEAR),) * 3, public=8, unlabeled=split(6, Key(9)))


def _read(name: str, when: Round, path: Path, tensors: dict[str, torch.Tensor], down: Any) -> None:
    method = METHODS[name]()
    try:
        plain = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # as the envelope has it
        raise TypedError("message", str(error)) from error
    up = unpack(MessageTypes.of(method).up, plain, tensors, ARCHS, "up")
    again: dict[str, torch.Tensor] = {}
    text = json.dumps(pack(up, again, "up"))
    back = unpack(MessageTypes.of(method).up, json.loads(text), again, ARCHS, "up")
    believe(len(list(leaves(back))) == len(list(leaves(up))), "reads differently again")
    check_reply(method, _task(name), down, up, when, 7)


# Sites ---------------------------------------------------------------------------------------------------------------------


def sites(folder: Path) -> list[Target]:
    """What a site and an operator have on disk."""
    provisioning.write(folder, None, ["a"], Operator())
    here = folder / "sites" / "a"
    x = np.arange(40 * 64, dtype="uint8").reshape(40, 1, 8, 8) % 16
    np.savez(here / "data.npz", x=x, y=np.arange(40) % 10)
    site = Site.read(here / "site.toml")
    expected = client_data(site)
    private = PrivateState(site.state, "run")
    state = State(DENSE_MODEL, {"own": DENSE_MODEL.params}, 0.5, 3)
    private.write(1, state)
    kept = next(private.folder.glob("*.safetensors"))

    def read_site() -> None:
        found = Site.read(here / "site.toml")
        found.task()
        client_data(found)

    def read_prepared() -> None:
        found = client_data(site)
        believe(torch.equal(found.train.rows, expected.train.rows), "other parts")
        believe(torch.equal(found.train.inputs(), expected.train.inputs()), "other samples")

    def read_private() -> None:
        _, found = private.read(State, ARCHS, 9)
        believe((found.best, found.waited) == (0.5, 3), "another state")
        pairs = zip(leaves(found), leaves(state), strict=True)
        believe(all(torch.equal(a, b) for (_, a), (_, b) in pairs if isinstance(a, torch.Tensor)), "other weights")

    return [
        Target("site site.toml", here / "site.toml", read_site, named=False),  # it may name another file that is not there
        Target("site experiment.toml", here / "experiment.toml", read_site, named=False),
        Target("site federation.toml", folder / "federation.toml", lambda: Federation.read(folder) and None),
        Target("site prepared data", site.state / "data.safetensors", read_prepared),
        Target("site private state", kept, read_private),
    ]


DENSE_MODEL = Model.init(DENSE, Key(1))

FAMILIES: dict[str, Callable[[Path], list[Target]]] = {
    "config": configs,
    "data": data,
    "run": runs,
    "message": messages,
    "site": sites,
}


def fuzz(family: str, cases: int, tick: Callable[[], None] = lambda: None, first: int = 0) -> Tally:
    """So many cases of one family, shared out among its targets."""
    tally = Tally()
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        targets = FAMILIES[family](place / family)
        originals = {target.path: target.path.read_bytes() for target in targets}
        for number in range(first, first + cases):
            target = targets[number % len(targets)]
            attempt(target, originals[target.path], number, tally)
            tick()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return tally


def rows(display: Display, quick: bool) -> Iterator[Row]:
    for family, cases in SHARES.items():
        count = cases // 100 if quick else cases
        display.start(f"fuzzing: {family}", count)
        tally = fuzz(family, count, display.advance)
        words = f"{tally.refused} refused, {tally.tried - tally.refused - len(tally.problems)} valid"
        detail = f"{words}; {'; '.join(tally.problems[:5])}" if tally.problems else words
        what = f"damaged {WORDS[family]}: refused in one line or valid; no traceback, no hang, no damaged data used"
        yield Row(what, tally.tried, tally.tried - len(tally.problems), detail)


WORDS = {
    "config": "configurations",
    "data": "data files",
    "run": "checkpoints and run directories",
    "message": "messages",
    "site": "files of sites",
}
