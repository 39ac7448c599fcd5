"""Large networks: the weights of a round rest in files, one client is at work at a time, and the results stay the same."""

import pytest
import torch

from fedme.core import model as core_model, tree
from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.core.model import Arch, Model, average, template
from fedme.execution import eager, routing
from fedme.execution.dispatcher import TOO_LARGE
from fedme.running import large_models, round_loop
from fedme.running.checkpoint import Checkpoint, Header, save
from fedme.running.weight_store import Store, Weights
from fedme_test_runs import difference, do, models
from fedme_test_support import DENSE

LARGE = 600  # weights; dnn-9 has 675 for digits


@pytest.fixture
def large(monkeypatch):
    """Networks with some hundred weights are large ones."""
    for module in (core_model, routing, eager, round_loop):
        monkeypatch.setattr(module, "LARGE_NETWORK", LARGE)
    core_model._template.cache_clear()
    yield
    core_model._template.cache_clear()


ONE = ["rounds=3", "models.assign=dnn-9", "models.pool=['dnn-9']", "models.shared=dnn-9", "train.epochs=1"]
MIXED = ["rounds=3", "models.assign=round-robin", "models.pool=['dnn-9','dnn-4']", "models.shared=dnn-9", "train.epochs=1"]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedme", "ditto", "hypcluster"])
def test_the_results_are_those_of_all_clients_together(method, tmp_path, request, monkeypatch):
    words = [*ONE, f"method.name={method}", "train.momentum=0.5", "engine.memory=0.00001"]
    eagerly = ["engine.path=workers", "engine.workers=1"]
    do(tmp_path / "together", *words, *eagerly)
    request.getfixturevalue("large")
    resting = []
    original = large_models.LargeModels.keep

    def keep(self, value):
        kept = original(self, value)
        resting.append(sum(weights.nbytes for weights in self.store.known if weights.tensors is not None))
        return kept

    monkeypatch.setattr(large_models.LargeModels, "keep", keep)
    do(tmp_path / "apart", *words, *eagerly)
    assert len(resting) > 3 * 2
    assert max(resting) <= 0.00001 * 2**30 / large_models.PART
    assert difference(tmp_path / "together", tmp_path / "apart") == ""
    do(tmp_path / "routed", *words)
    assert TOO_LARGE in (tmp_path / "routed" / "engine.log").read_text()
    first, second = models(tmp_path / "together"), models(tmp_path / "routed")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_small_networks_beside_large_ones(tmp_path, request):
    words = [*MIXED, "method.name=fedme", "engine.path=workers", "engine.workers=1", "engine.memory=0"]
    do(tmp_path / "together", *words)
    request.getfixturevalue("large")
    do(tmp_path / "apart", *words)
    assert difference(tmp_path / "together", tmp_path / "apart") == ""


def test_a_template_of_a_large_network_takes_no_memory(large):
    arch = Arch(torch.nn.Linear, in_features=40, out_features=20)
    assert {p.untyped_storage().nbytes() for p in template(arch, False).parameters()} == {4}
    x = torch.ones(2, 40)
    model = Model.init(arch, Key(1))
    assert torch.equal(model(x), arch.build(Key(1))(x))
    existing = torch.nn.Linear(40, 20)
    before = existing.weight.detach().clone()
    template(Arch.named("existing", lambda: existing), False)
    assert torch.equal(existing.weight, before)


def test_one_tensor_of_a_set_is_read_without_the_others(tmp_path):
    store = Store(tmp_path, 0)
    plain = [Model.init(DENSE, Key(number)) for number in range(3)]
    kept = store.keep(plain)
    assert tree.nbytes(kept[0].params) == tree.nbytes(plain[0].params)
    store.settle()
    mean = average(kept, [1, 2, 3])
    assert not any(weights.tensors for weights in store.known)
    expected = average(plain, [1, 2, 3])
    assert all(torch.equal(mean.params[name], expected.params[name]) for name in expected.params)
    (path,) = store.folder.glob("*.bin")
    last = kept[2].params
    assert isinstance(last, Weights)
    assert last.place is not None
    data = bytearray(path.read_bytes())
    data[last.place.offset] ^= 1  # sets of the same age are written in any order
    path.write_bytes(data)
    last.checked = None
    with pytest.raises(RunError, match="damaged"):
        last.peek(next(iter(last)))
    path.write_bytes(data[:40])
    for read in (store.read, lambda weights: store.read_one(weights, next(iter(weights)))):
        with pytest.raises(RunError, match="damaged|cannot be read"):
            read(last)
    store.close()


def test_a_checkpoint_writes_again_what_may_be_lost(tmp_path):
    store = Store(tmp_path, 0)
    kept = store.keep(Model.init(DENSE, Key(1)))
    store.settle(scratch=True)
    assert isinstance(kept.params, Weights)
    assert kept.params.scratch
    before = kept.params.place
    save(tmp_path, store, Checkpoint(Header(0, 0, {}), None, {"0": kept}, {DENSE.name: DENSE}), {})
    assert not kept.params.scratch
    assert kept.params.place != before
    assert [int(path.stem) for path in store.folder.iterdir()] == [kept.params.place.segment]
    kept.params.tensors = None
    assert torch.equal(kept.params["0.weight"], Model.init(DENSE, Key(1)).params["0.weight"])
    store.close()
