"""Every method as an object with ``fit``: it makes an ordinary run, which can be shown, compared and resumed like any other."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from fedme.api.client import Client, Networks
from fedme.api.result import Result
from fedme.config.experiment import ConfigError, Experiment, Supplied, parse
from fedme.config.hints import hints
from fedme.config.identity import digest
from fedme.config.settings import Settings, Spec
from fedme.core.atomic_files import RunError
from fedme.core.typed import TypedError, nearest
from fedme.datasets.python_objects import read_object
from fedme.datasets.user_data import fingerprint
from fedme.methods import METHODS
from fedme.results import summary
from fedme.running import run
from fedme.running.progress import Display

ELSEWHERE = ("method", "clients", "output", "partition")  # parts of an experiment that are no keywords here
TOP = {field.name for field in dataclasses.fields(Settings)} - set(ELSEWHERE)


class Learner:
    """A method with its settings.

    Keywords are what an experiment file has: its top keys (``rounds=30, seed=1``), its tables as dictionaries
    (``train={"lr": 0.05}``, ``finetune={"epochs": 2}``), and the settings of the method itself (``clusters=2``).
    """

    method: ClassVar[str]

    def __init__(self, **settings: Any) -> None:
        self.networks = Networks()
        self.settings = {key: value for key, value in settings.items() if key in TOP}
        mine = {field.name for field in dataclasses.fields(METHODS[self.method])}
        for key in settings:
            if key not in TOP and key not in mine:
                known = sorted({*TOP, *mine} - {"name", "data"})
                raise ConfigError(
                    f"{type(self).__name__}({key}=...): no such setting{nearest(key, known)}; there are {', '.join(known)}"
                )
        self.settings["method"] = {"name": self.method} | {k: v for k, v in settings.items() if k not in TOP}
        self.settings.setdefault("name", self.method)
        if "models" in self.settings:
            self.settings["models"] = self._named(self.settings["models"])
        parse({key: value for key, value in self.settings.items() if key != "data"})  # wrong settings are refused here

    def _spec(self, client: Client) -> Spec:
        """What the experiment says for a client's network; the error names the client."""
        assert client.model is not None
        try:
            return self.networks.spec(client.model)
        except TypedError as error:
            raise ConfigError(f"client {client.id}: {error}") from error

    def _named(self, models: Mapping[str, Any]) -> dict[str, Any]:
        """The table of models with names for the networks that were given as objects."""
        found = dict(models)
        if "pool" in found:
            found["pool"] = [self.networks.spec(network) for network in found["pool"]]
        if found.get("shared") is not None:
            found["shared"] = self.networks.spec(found["shared"])
        return found

    def fit(
        self,
        clients: Sequence[Client],
        unlabeled: Any = None,
        public: Any = None,
        output: str | Path | None = None,
        quiet: bool = False,
    ) -> Result:
        """Train, and return every client's personal model.

        `unlabeled` are inputs that the server has, or how many of the clients' samples to set aside for it; `public` are
        samples with labels that everybody has, or how many. `output` is the run directory; without one, the run is kept as
        long as the result. Called again with the same clients and output, it goes on where it was stopped.
        """
        experiment = self.experiment(clients, unlabeled, public)
        passing = output is None
        folder = Path(tempfile.mkdtemp(prefix="fedme-")) if output is None else Path(output)
        notes = hints(experiment)
        with Display(Console(stderr=True), quiet) as display:
            for note in notes:
                display.note(f"note: {note}", always=True)
            go(folder, experiment, display, notes)
        return Result(folder, experiment, passing)

    def experiment(self, clients: Sequence[Client], unlabeled: Any = None, public: Any = None) -> Experiment:
        """The experiment, with the samples at hand."""
        pieces, models = {}, {}
        if isinstance(clients, Client) or not all(isinstance(client, Client) for client in clients):
            raise ConfigError("clients: give a list of fedme.Client(name, train=(inputs, labels), model=...)")
        if not clients:
            raise ConfigError("clients: there are none; give at least one fedme.Client")
        for client in clients:
            if not isinstance(client.id, str) or not client.id:
                raise ConfigError(f"a client's name must be text, not {client.id!r}")
            if client.id in pieces:
                raise ConfigError(f"client {client.id}: two clients have this name; give each its own")
            pieces[client.id] = client.piece()
            models[client.id] = {} if client.model is None else {"model": self._spec(client)}
        counts = {name: value for name, value in (("unlabeled", unlabeled), ("public", public)) if isinstance(value, int)}
        data = {**self.settings.get("data", {}), **counts, "name": "given"}
        experiment = parse(self.settings | {"data": data, "clients": models})
        dataset = experiment.dataset.combine(
            "given", pieces, _extra(unlabeled, clients, "unlabeled", False), _extra(public, clients, "public", True)
        )
        marked = dataclasses.replace(experiment.dataset, fingerprint=fingerprint(dataset))
        return dataclasses.replace(experiment, dataset=marked, supplied=Supplied(dataset, self.networks.entries))


def _extra(given: Any, clients: Sequence[Client], name: str, labelled: bool) -> Any:
    """Samples that belong to no client; their labels are where the first client has its own."""
    if given is None or isinstance(given, int):
        return None
    label = next((client.columns for client in clients if client.columns is not None), None)
    return read_object(given, label, f"{name} samples", labelled)


def go(folder: Path, experiment: Experiment, display: Display, notes: Sequence[str]) -> None:
    """Start a run in this directory, or go on with the one that is there if it is the same."""
    plain = experiment.plain() | {"output": str(folder)}
    if not (folder / summary.CONFIG).exists():
        settings = dataclasses.replace(experiment.settings, output=str(folder))
        run.start(dataclasses.replace(experiment, settings=settings), display, notes)
        return
    if digest(summary.config_of(folder)) != digest(plain):
        raise RunError(f"{folder}: holds another run, with other settings or other samples; choose another output")
    run.resume(folder, display, experiment)
