"""Every method as an object with ``fit``: it makes an ordinary run, which can be shown, compared and resumed like any other."""

import dataclasses
import inspect
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from rich.console import Console

from fedme.api.client import Client, Networks
from fedme.api.result import Result
from fedme.config.experiment import ConfigError, Experiment, Supplied, parse
from fedme.config.hints import hints
from fedme.config.setting_help import settings_of
from fedme.config.settings import Settings, Spec
from fedme.core.typed import TypedError, nearest
from fedme.datasets.python_objects import read_object
from fedme.datasets.user_data import fingerprint
from fedme.methods import METHODS
from fedme.running import run
from fedme.running.progress import Display

# Experiment settings that are keywords of every learner. The others are arguments of `fit`, or come from the method.
EXPERIMENT = {field.name: field for field in dataclasses.fields(Settings) if field.name not in ("method", "clients", "output")}


class Learner:
    """A method with its settings.

    Keywords are what an experiment file has: its top keys (``rounds=30, seed=1``), its tables as dictionaries
    (``train={"lr": 0.05}``, ``finetune={"epochs": 2}``), and the settings of the method itself (``clusters=2``).
    """

    method: ClassVar[type[Any]]

    def __init__(self, *positional: Any, **settings: Any) -> None:
        called, own = type(self).__name__, _own_fields(self.method)
        if positional:
            raise ConfigError(f"{called}({positional[0]!r}, ...): settings are keywords, for example {called}(rounds=30)")
        for key in settings:
            if key not in EXPERIMENT and key not in own:
                known = sorted({*EXPERIMENT, *own} - {"name", "data"})
                tables = [table for table in ("train", "models", "engine") if key in _keys(EXPERIMENT[table])]
                where = f"; it is in a table: {tables[0]}={{{key!r}: ...}}" if tables else nearest(key, known)
                raise ConfigError(f"{called}({key}=...): no such setting{where}")
        self.networks = Networks()
        self.settings = {key: value for key, value in settings.items() if key in EXPERIMENT}
        self.settings["method"] = {"name": path_of(self.method)} | {k: v for k, v in settings.items() if k in own}
        self.settings.setdefault("name", self.method.name())
        if "models" in self.settings:
            self.settings["models"] = self._named(self.settings["models"])
        self._parsed({key: value for key, value in self.settings.items() if key != "data"})  # wrong settings are refused here

    def __repr__(self) -> str:
        given = {**self.settings, **self.settings["method"]}
        shown = [f"{key}={value!r}" for key, value in given.items() if key not in ("method", "name")]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _parsed(self, plain: Mapping[str, Any]) -> Experiment:
        return parse(plain, methods={path_of(self.method): self.method})

    def _spec(self, client: Client) -> Spec:
        """What the experiment says for a client's network; the error names the client."""
        assert client.model is not None
        try:
            return self.networks.spec(client.model)
        except TypedError as error:
            raise ConfigError(f"client {client.id}: {error}") from error

    def _named(self, models: Mapping[str, Any]) -> dict[str, Any]:
        """The table of models with names for the networks that were given as objects."""
        table = dict(models)
        if "pool" in table:
            table["pool"] = [self.networks.spec(network) for network in table["pool"]]
        if table.get("shared") is not None:
            table["shared"] = self.networks.spec(table["shared"])
        return table

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
            run.start_or_resume(folder, experiment, display, notes)
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
                raise ConfigError(f"a client's name must be a str, got {client.id!r}")
            if client.id in pieces:
                raise ConfigError(f"client {client.id}: two clients have this name; give each its own")
            pieces[client.id] = client.piece()
            models[client.id] = {} if client.model is None else {"model": self._spec(client)}
        counts = {name: value for name, value in (("unlabeled", unlabeled), ("public", public)) if isinstance(value, int)}
        data = {**self.settings.get("data", {}), **counts, "name": "given"}
        experiment = self._parsed(self.settings | {"data": data, "clients": models})
        dataset = experiment.dataset.combine(
            "given", pieces, _extra(unlabeled, clients, "unlabeled", False), _extra(public, clients, "public", True)
        )
        marked = dataclasses.replace(experiment.dataset, fingerprint=fingerprint(dataset))
        return dataclasses.replace(experiment, dataset=marked, supplied=Supplied(dataset, self.networks.entries))


def learner(method: type[Any]) -> type[Learner]:
    """The learner of a method class: ``learner(MyMethod)(rounds=30, step=0.5).fit(clients)``."""
    own, keyword = _own_fields(method), inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=_default(field), annotation=field.type)
        for name, field in {**own, **EXPERIMENT}.items()
    ]
    about = [f"    {s.name}: {s.about}" for s in settings_of(method)]
    doc = "\n".join(
        [method.__doc__ or "", "", "Settings of the method:", *about, "", *(Learner.__doc__ or "").splitlines()[2:]]
    )
    home = "fedme" if path_of(method) in METHODS else method.__module__
    body = {"method": method, "__doc__": doc, "__module__": home, "__signature__": inspect.Signature(parameters)}
    return type(method.__name__, (Learner,), body)


def path_of(method: type[Any]) -> str:
    """The name of a method in an experiment: of a built-in one, or the import path of a user's."""
    return method.name() if METHODS.get(method.name()) is method else f"{method.__module__}:{method.__qualname__}"


def _own_fields(method: type[Any]) -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(method) if field.name not in EXPERIMENT}


def _keys(table: Any) -> set[str]:
    options = [kind for kind in (table.type, *get_args(table.type)) if dataclasses.is_dataclass(kind)]
    return {field.name for kind in options for field in dataclasses.fields(kind)}


def _default(field: Any) -> Any:
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


def _extra(given: Any, clients: Sequence[Client], name: str, labelled: bool) -> Any:
    """Samples that belong to no client; their labels are where the first client has its own."""
    if given is None or isinstance(given, int):
        return None
    label = next((client.columns for client in clients if client.columns is not None), None)
    return read_object(given, label, f"{name} samples", labelled)
