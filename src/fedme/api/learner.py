"""Every method as an object with ``fit``: it makes an ordinary run, which can be shown, compared and resumed like any other."""

import copy
import dataclasses
import inspect
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self, get_args

from fedme.api.client import Client, Networks
from fedme.api.display import Table
from fedme.api.result import Result, display_for
from fedme.config.experiment import ConfigError, Experiment, Supplied, parse
from fedme.config.hints import hints
from fedme.config.setting_help import settings_of
from fedme.config.settings import Settings, Spec
from fedme.core.callbacks import Callback, Metric, check_name
from fedme.core.method import Method
from fedme.core.typed import TypedError, nearest
from fedme.datasets.python_objects import read_object
from fedme.datasets.user_data import fingerprint
from fedme.methods import METHODS
from fedme.running import run
from fedme.running.garbage_collection import existing_objects_left_out
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
        called = type(self).__name__
        if positional:
            raise ConfigError(f"{called}({positional[0]!r}, ...): settings are keywords, for example {called}(rounds=30)")
        vars(self)["networks"] = Networks()
        vars(self)["settings"] = {"method": {"name": path_of(self.method)}, "name": self.method.name()}
        self.set_params(**settings)

    def set_params(self, **settings: Any) -> Self:
        """Change settings, by the keywords of the constructor; ``learner.rounds = 60`` does the same."""
        called, own = type(self).__name__, _own_fields(self.method)
        for key in settings:
            if key not in EXPERIMENT and key not in own:
                raise ConfigError(f"{called}({key}=...): no such setting{self._elsewhere(key)}")
        changed = self.settings | {key: value for key, value in settings.items() if key in EXPERIMENT}
        changed["method"] = self.settings["method"] | {key: value for key, value in settings.items() if key in own}
        if "models" in settings:
            changed["models"] = self._named(settings["models"])
        self._parsed({key: value for key, value in changed.items() if key != "data"})  # wrong settings are refused here
        vars(self)["settings"] = changed
        return self

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings that were given, by keyword; `deep` is accepted as in scikit-learn and has no effect."""
        given = {**self.settings, **self.settings["method"], "name": self.settings["name"]}
        return {key: value for key, value in given.items() if key != "method"}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in EXPERIMENT and name not in _own_fields(self.method):
            raise AttributeError(f"{type(self).__name__} has no setting '{name}'{self._elsewhere(name)}")
        self.set_params(**{name: value})

    def __getattr__(self, name: str) -> Any:
        if name not in EXPERIMENT and name not in _own_fields(self.method):
            raise AttributeError(f"{type(self).__name__} has no setting '{name}'")
        if name in ("data", "partition"):  # their keys depend on the clients: what was given, read-only
            return MappingProxyType(dict(self.settings.get(name, {})))
        parsed = self._parsed({key: value for key, value in self.settings.items() if key != "data"})
        return getattr(parsed.settings if name in EXPERIMENT else parsed.method, name)

    def __repr__(self) -> str:
        shown = [f"{key}={value!r}" for key, value in self.get_params().items() if key != "name"]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_html_(self) -> str:
        given = self.get_params()
        rows = [(s.name, "" if s.default is None else str(s.default), s.about) for s in settings_of(self.method)]
        rows += [(key, "", "") for key in given if key not in {row[0] for row in rows} | {"name"}]
        cells = [(name, repr(given[name]) if name in given else "", default, about) for name, default, about in rows]
        about = (self.method.__doc__ or "").splitlines()[0]
        return Table(f"{type(self).__name__}: {about}", ("setting", "given", "default", "about"), cells)._repr_html_()

    def _elsewhere(self, key: str) -> str:
        """The end of an error message: the table that has a setting, or the most similar setting."""
        known = sorted({*EXPERIMENT, *_own_fields(self.method)} - {"name", "data"})
        tables = [table for table in ("train", "models", "engine") if key in _keys(EXPERIMENT[table])]
        by_name = f"; weights that travel cannot be named: {self.method.not_by_name}" if key == "shared" else ""
        return f"; it is in a table: {tables[0]}={{{key!r}: ...}}{by_name}" if tables else nearest(key, known)

    def with_seed(self, seed: int) -> Self:
        """The same method with another seed."""
        return copy.copy(self).set_params(seed=seed)

    def _parsed(self, plain: Mapping[str, Any]) -> Experiment:
        return parse(plain, methods={path_of(self.method): self.method})

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
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Result:
        """Train, and return every client's personal model.

        `unlabeled` are inputs that the server has, or how many of the clients' samples to set aside for it; `public` are
        samples with labels that everybody has, or how many. `output` is the run directory; without one, the run is kept as
        long as the result. Called again with the same clients and output, it goes on where it was stopped; with more rounds,
        it extends the run. With `quiet`, nothing is printed.

        `metrics` are functions of outputs and targets by name, as in ``{"top3": top3}``; `callbacks` are objects of
        `fedme.Callback`. Both are recorded and change nothing else.
        """
        passing = output is None
        # A folder of its own around it: what a run keeps for its neighbours must not be in a folder that everybody writes to.
        folder = Path(tempfile.mkdtemp(prefix="fedme-")) / "run" if output is None else Path(output)
        try:
            with display_for(quiet) as display:
                return self.run(clients, folder, display, unlabeled, public, metrics, callbacks, passing)
        except BaseException:
            if passing:
                shutil.rmtree(folder.parent, ignore_errors=True)
            raise

    @existing_objects_left_out()
    def run(
        self,
        clients: Sequence[Client],
        folder: Path,
        display: Display,
        unlabeled: Any = None,
        public: Any = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
        passing: bool = False,
    ) -> Result:
        """The same as `fit` in a given directory, which is deleted with its parent and the result if it is `passing`."""
        experiment = self.experiment(clients, unlabeled, public, metrics, callbacks)
        if passing:  # nobody can go on with it
            settings = dataclasses.replace(experiment.settings, checkpoint_every=experiment.settings.rounds)
            experiment = dataclasses.replace(experiment, settings=settings)
        notes = hints(experiment)
        for note in notes:
            display.note(f"note: {note}", always=True)
        run.start_or_resume(folder, experiment, display, notes)
        return Result(folder, experiment, passing)

    def experiment(
        self,
        clients: Sequence[Client],
        unlabeled: Any = None,
        public: Any = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Experiment:
        """The experiment, with the samples at hand."""
        for name, metric in (metrics or {}).items():
            check_name(name, "metrics")
            if not callable(metric):
                raise ConfigError(f"metrics: '{name}' must be a function of outputs and targets, got {type(metric).__name__}")
        if wrong := [callback for callback in callbacks if not isinstance(callback, Callback)]:
            raise ConfigError(f"callbacks: must be objects of classes that inherit from fedme.Callback, got {wrong[0]!r}")
        pieces, models, networks = {}, {}, self.networks.copy()
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
            models[client.id] = {} if client.model is None else {"model": _spec(networks, client)}
        counts = {name: value for name, value in (("unlabeled", unlabeled), ("public", public)) if isinstance(value, int)}
        data = {**self.settings.get("data", {}), **counts, "name": "given"}
        experiment = self._parsed(self.settings | {"data": data, "clients": models})
        dataset = experiment.dataset.combine(
            "given", pieces, _extra(unlabeled, clients, "unlabeled", False), _extra(public, clients, "public", True)
        )
        marked = dataclasses.replace(experiment.dataset, fingerprint=fingerprint(dataset))
        supplied = Supplied(dataset, networks.entries, dict(metrics or {}), tuple(callbacks))
        return dataclasses.replace(experiment, dataset=marked, supplied=supplied)


def learner(method: type[Any]) -> type[Learner]:
    """The learner of a method class: ``learner(MyMethod)(rounds=30, step=0.5).fit(clients)``."""
    if not (isinstance(method, type) and issubclass(method, Method)):
        known = METHODS.get(method) if isinstance(method, str) else None
        instead = f"; the learner of '{method}' is fedme.{known.__name__}" if known is not None else ""
        raise ConfigError(f"learner({method!r}): expected a class that implements a method{instead}")
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


def _spec(networks: Networks, client: Client) -> Spec:
    """What the experiment says for a client's network; the error names the client."""
    assert client.model is not None
    try:
        return networks.spec(client.model)
    except TypedError as error:
        raise ConfigError(f"client {client.id}: {error}") from None


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
