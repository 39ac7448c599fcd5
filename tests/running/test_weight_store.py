"""Weights at rest: a budget of memory, files that are written once, and nothing believed that is read."""

import pickle
from collections.abc import Generator

import pytest
import torch
from hypothesis import given, strategies as st

from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.core.model import Arch, Model, average
from fedme.execution.reference import one_by_one
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import run_round
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme.running.checkpoint import Checkpoint, Header, load, save, states
from fedme.running.weight_store import Store, Weights
from fedme_test_support import DENSE, DROPPING, NORMALISED, WIDE, clients, federate, personal, same, split, task

TRAIN = Training(epochs=1, batch=4, lr=0.1, momentum=0.9)
SIZE = sum(p.numel() * 4 for p in Model.init(DENSE, Key(0)).params.values())


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path, 0)
    yield made
    made.close()


def model(number):
    return Model.init(DENSE, Key(number))


def held(store):
    return sum(weights.nbytes for weights in store.known if weights.tensors is not None)


def test_a_budget_of_nothing_keeps_nothing_in_memory_and_loses_nothing(store):
    kept = store.keep({str(i): model(i) for i in range(5)})
    assert held(store) == 5 * SIZE
    store.settle()
    assert held(store) == 0
    assert all(same(kept[str(i)], model(i)) for i in range(5))
    assert held(store) == 5 * SIZE
    written = sorted(path.name for path in store.folder.iterdir())
    store.settle()
    assert held(store) == 0
    assert sorted(path.name for path in store.folder.iterdir()) == written  # nothing is written twice


def test_what_was_used_longest_ago_goes_first(tmp_path):
    store = Store(tmp_path, 2 * SIZE)
    kept = store.keep([model(i) for i in range(3)])
    store.settle()
    assert held(store) == 2 * SIZE
    for turn in (0, 2, 1, 0):
        kept[turn](torch.zeros(1, *_shape()))
        store.settle()
        assert kept[turn].params.tensors is not None
    assert kept[1].params.tensors is not None  # used before last
    assert kept[2].params.tensors is None
    store.close()


def _shape():
    return tuple(clients()["0"].train.inputs().shape[1:])


def test_kept_weights_do_whatever_weights_do(store):
    a, b = model(1), model(2)
    kept = store.keep([a, b])
    store.settle()
    x = torch.randn(3, *_shape(), generator=Key(3).torch())
    assert torch.equal(kept[0](x), a(x))
    assert same(average(kept), average([a, b]))
    assert torch.equal(kept[0].module()(x), a.module()(x))
    assert kept[0].finite
    assert kept[0].dtype == torch.float32
    travelled = pickle.loads(pickle.dumps(kept[0].params))
    assert type(travelled) is dict
    assert same(a.with_params(travelled), a)


def test_a_state_is_kept_as_it_is_and_shared_weights_once(store):
    one = model(1)
    state = {"a": one, "b": one, "plain": (1, "x", None), "none": {}, "deep": [{"opt": {"w": torch.ones(2)}}]}
    kept = store.keep(state)
    assert kept["a"].params is kept["b"].params
    assert kept["plain"] is state["plain"]
    assert isinstance(kept["deep"][0]["opt"], Weights)
    assert store.keep(kept) is kept
    assert store.keep(kept["a"]) is kept["a"]


@given(st.data())
def test_every_type_and_shape_comes_back(tmp_path_factory, data):
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    drawn = data.draw(st.dictionaries(st.text(max_size=5), st.tuples(st.sampled_from(kinds), shapes), min_size=1, max_size=5))
    tensors = {name: torch.randint(0, 2, shape).to(kind) for name, (kind, shape) in drawn.items()}
    store = Store(tmp_path_factory.mktemp("store"), 0)
    kept = store.keep(tensors)
    store.settle()
    assert list(kept) == list(tensors)
    assert len(kept) == len(tensors)
    for name, tensor in tensors.items():
        assert kept[name].dtype == tensor.dtype
        assert torch.equal(kept[name], tensor)
        assert kept.sketch()[name].shape == tensor.shape
    store.close()


class Models:
    """The types of a method whose clients keep a model."""

    exchanged = ()

    def init_server(self) -> None: ...
    def client_round(self, state: Model, down: Model) -> Generator[None, None, tuple[Model, Model, None]]: ...


def files(store):
    return {path.name: path.stat().st_mtime_ns for path in store.folder.iterdir()}


def test_a_checkpoint_writes_only_what_is_new(tmp_path):
    store = Store(tmp_path, 2**30)
    archs = {DENSE.name: DENSE}
    clients = {str(i): store.keep(model(i)) for i in range(10)}
    save(tmp_path, store, Checkpoint(Header(0, 0, {}), None, clients, {DENSE.name: DENSE}), {})
    before = files(store)
    clients["3"] = store.keep(model(33))
    save(tmp_path, store, Checkpoint(Header(1, 0, {}), None, clients, {DENSE.name: DENSE}), {})
    after = files(store)
    assert before.items() <= after.items()
    (new,) = after.keys() - before.keys()
    assert (store.folder / new).stat().st_size == SIZE
    for i in range(4, 10):  # nothing of the old file but three models is needed now: it is given up
        clients[str(i)] = store.keep(model(40 + i))
    save(tmp_path, store, Checkpoint(Header(2, 0, {}), None, clients, {DENSE.name: DENSE}), {})
    assert not before.keys() & files(store).keys()
    assert sum(path.stat().st_size for path in store.folder.iterdir()) == 10 * SIZE

    again = Store(tmp_path, 2**30)
    found = load(tmp_path, {})
    assert found.header.round == 2

    back = states(tmp_path, again, found, Models(), archs).clients
    assert held(again) == 0  # nothing is read before it is wanted
    assert all(same(back[c], clients[c]) for c in clients)
    assert again.next > store.next - 1
    store.close(), again.close()


def test_damage_is_noticed_and_named(tmp_path):
    store = Store(tmp_path, 0)
    kept = store.keep(model(1))
    save(tmp_path, store, Checkpoint(Header(0, 0, {}), None, {"0": kept}, {DENSE.name: DENSE}), {})
    store.settle()
    (path,) = store.folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RunError, match=r"000000.bin: damaged \(wrong checksum\)"):
        kept.params.loaded()
    path.write_bytes(whole[:-1])
    with pytest.raises(RunError, match="cannot be read"):
        kept.params.loaded()
    found = load(tmp_path, {})

    with pytest.raises(RunError, match="is too short.*delete it to start again"):
        states(tmp_path, store, found, Models(), {DENSE.name: DENSE})
    path.unlink()
    with pytest.raises(RunError, match="is missing.*delete it to start again"):
        states(tmp_path, store, found, Models(), {DENSE.name: DENSE})
    path.write_bytes(whole)
    with pytest.raises(RunError, match="does not fit other"):
        states(tmp_path, store, found, Models(), {DENSE.name: Arch.named("other", WIDE.factory, **dict(WIDE.options))})
    store.close()


def test_a_failure_of_the_writer_is_raised_where_it_is_waited_for(store):
    def fail():
        raise RunError("no room")

    store.later(fail)
    with pytest.raises(RunError, match="no room"):
        store.later(lambda: None)
    store.wait()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_same_with_hardly_any_memory(name, tmp_path):
    method = METHODS[name](train=TRAIN)
    mixed = name in ("local", "fd", "feddf", "fedmd", "fml", "pfml", "fedme")
    archs = (DENSE, NORMALISED, DROPPING) if mixed else (NORMALISED,) * 3
    setting = task(archs, shared=NORMALISED, public=8, unlabeled=split(6, Key(9)))
    data = clients((5, 8, 3), public=8)
    expected = personal(method, *federate(method, setting, data, rounds=2), 2)
    store, plain = Store(tmp_path, 0), one_by_one

    def hungry(operations):
        store.settle()  # nothing stays in memory, not even between the operations of a client
        return plain(operations)

    engine = InProcessEngine(method, setting, data, Key(0), hungry)
    server = store.keep(method.init_server(setting, Key(0).at("init")))
    for t in range(2):
        server = store.keep(run_round(method, setting, engine, server, t, 2, Key(0)).server)
        engine.states = store.keep(engine.states)
        store.settle()
        assert held(store) == 0
    found = personal(method, server, engine, 2)
    assert all(same(found[client], expected[client]) for client in expected)
    store.close()


def test_a_set_may_get_another_place_while_it_is_read(store, monkeypatch):
    kept = store.keep({str(i): model(i) for i in range(2)})
    store.settle()
    weights = max((kept[name].params for name in kept), key=lambda each: each.place.offset)
    wanted, before = store.read(weights), weights.place
    store.write([weights])  # as a checkpoint does in another thread
    after, weights.place = weights.place, before
    path = store._path

    def moved(segment):
        weights.place = after
        return path(segment)

    monkeypatch.setattr(store, "_path", moved)
    assert (before.segment, before.offset) != (after.segment, after.offset)
    assert all(torch.equal(value, wanted[name]) for name, value in store.read(weights).items())
