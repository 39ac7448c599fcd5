"""Models as values: an architecture and its weights, which can be called, sent, averaged and saved.

`Arch` describes how to build a network (a callable and its arguments), `Model` adds weights. Any `nn.Module` works unchanged.
Dropout layers draw keyed masks, so that a model gets the same masks whether it is trained separately or in a stack of clients.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint

from fedme.core import tree
from fedme.core.dropout import KeyedDropout, key_functional_dropout
from fedme.core.flat_params import FlatParams, flat_params
from fedme.core.key import Key

Option = int | float | str | bool | tuple[int, ...]
LARGE_NETWORK = 1 << 24  # weights from which on a network is trained without a copy that is not needed
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # attributes of a module


@dataclass(frozen=True, init=False)
class Arch:
    """An architecture: ``Arch(MyNet, width=64)``. Equal architectures build equal networks."""

    name: str
    factory: Callable[..., nn.Module] = field(repr=False)
    options: tuple[tuple[str, Option], ...] = field(repr=False)  # what a user gave is in the name

    def __init__(self, factory: Callable[..., nn.Module], /, **options: Option) -> None:
        if not hasattr(factory, "__qualname__"):
            raise TypeError(f"{factory!r} has no name; use Arch.named(name, factory, ...)")
        shown = ", ".join(f"{key}={value}" for key, value in sorted(options.items()))
        label = f"{factory.__module__}:{factory.__qualname__}"
        self._fill(f"{label}({shown})" if shown else label, factory, options)

    @classmethod
    def named(cls, name: str, factory: Callable[..., nn.Module], /, **options: Option) -> "Arch":
        """An architecture with the given name, as in the table of built-in architectures."""
        arch = cls.__new__(cls)
        arch._fill(name, factory, options)
        return arch

    def _fill(self, name: str, factory: Callable[..., nn.Module], options: Mapping[str, Option]) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "factory", factory)
        object.__setattr__(self, "options", tuple(sorted(options.items())))

    def __wire__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # tables of what was made once per architecture are looked into very often
        return hash((self.name, self.factory, self.options))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}  # another process hashes differently

    def build(self, key: Key) -> nn.Module:
        """A new network with weights drawn from `key`, in evaluation mode. The global random state does not change."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key.integer())
            return self.factory(**dict(self.options)).eval()

    @functools.cached_property
    def parameters(self) -> int:
        """The number of weights."""
        return _parameters(self)

    @functools.cached_property
    def nbytes(self) -> int:
        """Its size in a message: that of its name."""
        return len(self.name.encode())


@functools.lru_cache(maxsize=256)
def _parameters(arch: Arch) -> int:
    return sum(p.numel() for p in template(arch, training=False).parameters())


def template(arch: Arch, training: bool, statistics: bool = True) -> nn.Module:
    """A cached network into which models put their weights to be evaluated. Its own weights do not matter.

    Without `statistics`, batch normalisation uses its running statistics even in training mode.
    """
    return _template(arch, training, statistics)


@functools.lru_cache(maxsize=256)
def _template(arch: Arch, training: bool, statistics: bool) -> nn.Module:
    module = build_template(arch, training, statistics)
    if sum(p.numel() for p in module.parameters()) >= LARGE_NETWORK and _builds_new_weights(arch):
        for p in module.parameters():
            if p.requires_grad:
                p.data = torch.zeros((), dtype=p.dtype).expand(p.shape)  # takes no memory; models bring their own weights
    return module


@functools.lru_cache(maxsize=256)
def _builds_new_weights(arch: Arch) -> bool:
    """Whether every network has weights of its own; a factory may also return a network that exists already."""
    return not {*arch.build(Key(0)).parameters()} & {*arch.build(Key(0)).parameters()}


def build_template(arch: Arch, training: bool, statistics: bool = True) -> nn.Module:
    """A network like `template` that is not cached."""
    module = arch.build(Key(0)).train(training)
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if type(child) is nn.Dropout and name:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, KeyedDropout(child.p).train(training))
        if isinstance(child, _BatchNorm) and not statistics:
            child.eval()
    key_functional_dropout(module)
    if training:
        _refuse_what_ties_weights(arch, module)
    return module


def _refuse_what_ties_weights(arch: Arch, module: nn.Module) -> None:
    """Refuse modules that cannot run with the weights of another model than their own.

    A checkpoint computes its part again in the backward pass, when the template has the weights of another model.
    """
    for child in module.modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise TypeError(f"{arch.name} has a part that was made by torch.jit, which cannot be used; use the module itself")
        forward = inspect.getattr_static(type(child), "forward", None)
        code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
        used = [names.get(name) for name in code.co_names] if code is not None else []
        spelled = code is not None and {"torch", "utils", "checkpoint"} <= set(code.co_names)
        if spelled or any(value is checkpoint or value is checkpoint.checkpoint for value in used):
            raise TypeError(
                f"{arch.name}: the forward pass of {type(child).__name__} uses torch.utils.checkpoint, which cannot be used "
                "here; call the function itself"
            )


@functools.lru_cache(maxsize=256)
def dropout_layers(arch: Arch) -> tuple[str, ...]:
    """The names of the dropout layers with keyed masks."""
    return tuple(name for name, m in template(arch, True).named_modules() if isinstance(m, KeyedDropout))


@functools.lru_cache(maxsize=256)
def has_batchnorm(arch: Arch) -> bool:
    """Whether the network has batch normalisation, which has no statistics for a batch of one sample."""
    return any(isinstance(m, _BatchNorm) for m in template(arch, True).modules())


@functools.lru_cache(maxsize=256)
def hooks_obstacle(arch: Arch) -> str:
    """Why a network must be called as a module, client by client: it has hooks, which may do anything. Empty if it has none."""
    for name, module in template(arch, True).named_modules():
        if any(getattr(module, hooks, None) for hooks in HOOKS):
            return f"{f'its part {name}' if name else 'the network'} ({type(module).__name__}) has hooks"
    return next((f"its weight {name} has hooks" for name, _ in weight_hooks(arch)), "")


@functools.lru_cache(maxsize=256)
def weight_hooks(arch: Arch) -> tuple[tuple[str, Callable[[Tensor], Tensor | None]], ...]:
    """The hooks that change the gradients of weights (``weight.register_hook``), with the names of the weights."""
    named = template(arch, True).named_parameters()
    return tuple((name, hook) for name, p in named for hook in (p._backward_hooks or {}).values())


@functools.lru_cache(maxsize=256)
def has_ties(arch: Arch) -> bool:
    """Whether the network has tied weights: a weight or a buffer with several names."""
    module = template(arch, True)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return len({id(tensor) for _, tensor in named}) < len(named)


@functools.lru_cache(maxsize=256)
def frozen_weights(arch: Arch, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The weights of a network that no training changes (``requires_grad = False``).

    They belong to the architecture: all its models have these very tensors, so they are in memory once, and neither travel nor
    are saved with every model.
    """
    named = template(arch, training=False).named_parameters()
    return {name: _cast(p.detach(), dtype) for name, p in named if not p.requires_grad}


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


class WithFrozen(Mapping[str, Tensor]):
    """The buffers of a model: its own, and the frozen weights of its architecture."""

    def __init__(self, own: tree.Params, frozen: tree.Params) -> None:
        self.own, self.frozen = own, frozen

    def __getitem__(self, name: str) -> Tensor:
        return self.own[name] if name in self.own else self.frozen[name]

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self.frozen, self.own)

    def __len__(self) -> int:
        return len(self.own) + len(self.frozen)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process receives plain tensors."""
        return dict, (dict(self),)


@dataclass(frozen=True)
class Model:
    """An architecture with weights. `params` are trained; `buffers` are all others (statistics, frozen weights)."""

    arch: Arch
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @classmethod
    def init(cls, arch: Arch, key: Key, dtype: torch.dtype = torch.float32) -> "Model":
        """A model with random initial weights, except for frozen ones, which all models of the architecture share."""
        return cls.of(arch, arch.build(key), dtype).with_frozen(always=True)

    @classmethod
    def of(cls, arch: Arch, module: nn.Module, dtype: torch.dtype = torch.float32) -> "Model":
        """A model with a copy of the weights of `module`."""

        def own(value: Tensor) -> Tensor:
            value = value.detach().clone()
            return value.to(dtype) if value.is_floating_point() else value

        named = list(module.named_parameters())
        params = {name: own(p) for name, p in named if p.requires_grad}
        frozen = {name: own(p) for name, p in named if not p.requires_grad}
        return cls(arch, params, frozen | {name: own(b) for name, b in module.named_buffers()})

    def __call__(
        self, x: Any, *, training: bool = False, masks: Mapping[str, Tensor] | None = None, first: int | Tensor = 0
    ) -> Tensor:
        """The logits for the inputs `x`: a tensor, or a dictionary of tensors passed by name.

        In training mode buffers such as running statistics are updated in place: pass a copy. `masks` seeds each dropout
        layer, and `first` is the position of `x` in its batch. For a batch of one sample, batch normalisation uses its running
        statistics.
        """
        module = template(self.arch, training, not (training and _samples(x) == 1 and has_batchnorm(self.arch)))
        begin(module, masks or {}, first)
        seeds = {f"{layer}.seed": seed for layer, seed in (masks or {}).items()}
        weights = {**self.params, **self.buffers, **seeds}
        given = ((), dict(x)) if isinstance(x, Mapping) else ((x,), {})
        with default_dtype(self.dtype):  # a network may make tensors in its forward pass
            logits = output_of(functional_call(module, weights, *given, tie_weights=has_ties(self.arch)))
        if training and isinstance(self.buffers, dict):  # a module may replace a buffer instead of changing it in place
            self.buffers.update({name: weights[name].detach() for name in self.buffers})
        return logits

    def with_params(self, params: tree.Params) -> "Model":
        """The same architecture and buffers with other weights."""
        return Model(self.arch, params, self.buffers)

    def with_buffers(self, buffers: tree.Params) -> "Model":
        """The same architecture and weights with other buffers."""
        return Model(self.arch, self.params, buffers)

    def with_frozen(self, always: bool = False) -> "Model":
        """The same model with the frozen weights of its architecture where it has equal ones, or `always`."""
        frozen = frozen_weights(self.arch, self.dtype) if self.buffers else {}
        taken = {
            name: value
            for name, value in frozen.items()
            if name in self.buffers and (always or self.buffers[name] is value or _equal(self.buffers[name], value))
        }
        if not taken or (isinstance(self.buffers, WithFrozen) and self.buffers.frozen.keys() == taken.keys()):
            return self
        return Model(self.arch, self.params, WithFrozen({n: v for n, v in self.buffers.items() if n not in taken}, taken))

    def frozen_like(self, given: "Model") -> "Model":
        """The same model with the frozen weights of `given`, from which it was trained."""
        if not isinstance(given.buffers, WithFrozen):
            return self
        frozen = given.buffers.frozen
        own = {name: value for name, value in self.buffers.items() if name not in frozen}
        return self.with_buffers(WithFrozen(own, frozen))

    @property
    def own_buffers(self) -> tree.Params:
        """The buffers without the frozen weights of the architecture."""
        return self.buffers.own if isinstance(self.buffers, WithFrozen) else self.buffers

    def frozen(self, names: Iterable[str]) -> "Model":
        """The same model with the weights `names` among the buffers: training does not change them."""
        fixed = set(names)
        params = {name: value for name, value in self.params.items() if name not in fixed}
        return Model(self.arch, params, {**{name: self.params[name] for name in self.params if name in fixed}, **self.buffers})

    def thawed(self, names: Iterable[str]) -> "Model":
        """The same model with the frozen weights `names` among those that are trained, in the order of the architecture."""
        free, weights = set(names), {**self.params, **self.buffers}
        order = (name for name, _ in template(self.arch, False).named_parameters())
        params = {name: weights[name] for name in order if name in self.params or name in free}
        return Model(self.arch, params, {name: value for name, value in self.buffers.items() if name not in free})

    @functools.cached_property
    def finite(self) -> bool:
        """Whether all weights are finite; training may diverge. Computed once, because models do not change."""
        own = self.own_buffers
        return tree.is_finite(self.params) and (not own or tree.is_finite(own))

    def set_finite(self) -> None:
        """Note what whoever computed the weights has found: that all are finite."""
        vars(self)["finite"] = True

    @property
    def nbytes(self) -> int:
        """Its size in a message."""
        if type(self.params) is FlatParams and not self.buffers:
            return self.arch.nbytes + self.params.layout.nbytes
        return self._nbytes

    @functools.cached_property
    def _nbytes(self) -> int:
        own = self.own_buffers
        return self.arch.nbytes + tree.nbytes(self.params) + (tree.nbytes(own) if own else 0)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        if (known := getattr(self.params, "dtype", None)) is not None:  # of weights that are elsewhere
            return known  # type: ignore[no-any-return]
        if (flat := flat_params(self.params)) is not None:
            return flat.layout.dtype
        return next((p.dtype for p in self.params.values()), torch.float32)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        if (known := getattr(self.params, "device", None)) is not None:  # of weights that are elsewhere
            return known  # type: ignore[no-any-return]
        return next((p.device for p in (*self.params.values(), *self.buffers.values())), torch.device("cpu"))

    @property
    def parameters(self) -> int:
        """The number of weights, including frozen ones."""
        return self.arch.parameters

    def module(self) -> nn.Module:
        """An ordinary `nn.Module` with these weights, in evaluation mode."""
        module = self.arch.build(Key(0))
        return load(module.to(self.dtype), {**self.params, **self.buffers})


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let torch make tensors of this type, and of the one before afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def not_finite(message: Any) -> Iterator[str]:
    """The places of a message that hold a NaN or infinite value. Models that are known to be finite are skipped."""
    for at, leaf in tree.leaves(message, opaque=(Model,)):
        if not (isinstance(leaf, Model) and leaf.finite):
            yield from tree.not_finite({at: leaf})


def surely_finite(message: Any) -> bool:
    """Whether a message obviously holds finite numbers only: models, texts, whole numbers. Most do; else see `not_finite`."""
    if (fields := tree.message_fields(type(message))) is None:
        return False
    for name in fields:
        value = getattr(message, name)
        if not (value.finite if type(value) is Model else value is None or isinstance(value, (str, int))):
            return False
    return True


def begin(module: nn.Module, layers: Iterable[str], first: int | Tensor = 0) -> None:
    """Prepare the dropout layers of a template for a forward pass; `first` is the position of its first sample in the batch."""
    for layer in layers:
        dropout = module.get_submodule(layer)
        dropout.calls, dropout.first = 0, first  # type: ignore[assignment]


def output_of(answer: Any) -> Tensor:
    """The logits in the output of a network: the tensor itself, or its attribute `logits` as with Hugging Face models."""
    logits = answer if isinstance(answer, Tensor) else getattr(answer, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"a network must return a tensor, or an object with the attribute logits, got {type(answer).__name__}; "
            "wrap it in a module that returns its outputs"
        )
    return logits


def _samples(x: Any) -> int:
    return len(next(iter(x.values())) if isinstance(x, Mapping) else x)


def load(module: nn.Module, weights: tree.Params) -> nn.Module:
    """Copy named weights and buffers into `module`."""
    slots = dict(module.named_parameters()) | dict(module.named_buffers())
    if missing := sorted(slots.keys() ^ weights.keys()):
        raise ValueError(f"the weights do not fit the network: {', '.join(missing[:5])}")
    with torch.no_grad():
        for name, slot in slots.items():
            slot.copy_(weights[name])
    return module


def average(models: Sequence[Model], weights: Sequence[float] | None = None, combine: tree.Combine = tree.average) -> Model:
    """The mean of models of one architecture, weighted by `weights` (any positive numbers) or uniform.

    `combine` replaces the mean, for instance by a robust one.
    """
    arch = models[0].arch
    if any(model.arch is not arch and model.arch != arch for model in models):
        raise ValueError(f"cannot average {', '.join(sorted({m.arch.name for m in models}))}: different architectures")
    total = float(sum(weights)) if weights is not None else float(len(models))
    normalised = [weight / total for weight in weights] if weights is not None else [1.0 / total] * len(models)
    params = combine([model.params for model in models], normalised)
    first = models[0].buffers  # of which those that are equal, such as frozen weights, stay as they are to the last bit
    if not first:
        return Model(arch, params, {})
    same = {name for name, value in first.items() if all(_equal(model.buffers[name], value) for model in models[1:])}
    changed = [{name: model.buffers[name] for name in first if name not in same} for model in models]
    combined = combine(changed, normalised) if changed[0] else {}
    buffers = {name: first[name] if name in same else combined[name] for name in first}
    return Model(arch, params, buffers).with_frozen()


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b)


def models_in(value: Any, at: str = "") -> Iterator[tuple[str, Model]]:
    """Every model in a value, with its place."""
    return ((place, leaf) for place, leaf in tree.leaves(value, at, (Model,)) if isinstance(leaf, Model))
