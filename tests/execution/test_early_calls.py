"""Small operations that begin before all are known: the same results, in the same order."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from fedme.core.flat_params import flat_copy
from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import BatchSchedule, Evaluate, Predict, Train, evaluate, predict, train
from fedme.execution import compiled, compiled_jobs, compiled_networks, early_calls
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.input_tables import InputTables
from fedme.execution.lockstep import run_in_lockstep
from fedme.execution.routing import Route
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme_test_support import DENSE, NORMALISED, WIDE, clients, federate, personal, same, split, task

pytestmark = pytest.mark.skipif(isinstance(compiled.library(), str), reason="there is no compiled code")
COUNT = 40


class NotEarly:
    """The same executor, which does not hear of operations before all are known."""

    def __init__(self, dispatcher):
        self.dispatcher = dispatcher

    def __call__(self, operations):
        return self.dispatcher(operations)


def work(number, data):
    """A client that trains, evaluates and predicts; some have a network that compiled code does not hand out early."""
    arch = (DENSE, WIDE, NORMALISED)[number % 3]
    model = Model.init(arch, Key(number), torch.float64)
    pair = {"own": model, "guest": Model.init(DENSE, Key(number, ("guest",)), torch.float64)}
    optimizer = SGD(Mutual("own", "guest"), 0.1, 0.9) if number % 2 else SGD(CrossEntropy(), 0.1)
    models = pair if number % 2 else {"own": model}
    trained = yield from train(models, optimizer, data.train, BatchSchedule(2, 5), Key(number).at("train"))
    score = yield from evaluate(trained.models["own"], data.val, timed=number == 7)
    logits = yield from predict(trained.models["own"], data.test)
    return trained, (score.loss, score.accuracy), logits


def done(dispatcher, early=True):
    data = clients(sizes=tuple(range(3, 3 + COUNT)))
    computations = {client: work(int(client), mine) for client, mine in data.items()}
    return run_in_lockstep(computations, dispatcher if early else NotEarly(dispatcher))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("effort_of_a_call", [1.0, 1e4, 1e12])
def test_results_and_explanations_are_the_same_to_the_bit(workers, effort_of_a_call, monkeypatch):
    monkeypatch.setattr(early_calls, "TRAIN_CALL", effort_of_a_call)
    monkeypatch.setattr(early_calls, "PREDICT_CALL", effort_of_a_call)
    early, late = Dispatcher(workers=workers), Dispatcher(workers=workers)
    wanted = done(late, early=False)
    for client, one in done(early).items():
        (trained, score, logits), (its_trained, its_score, its_logits) = one.value, wanted[client].value
        assert (score, trained.losses) == (its_score, its_trained.losses)
        assert torch.equal(logits, its_logits)
        assert all(same(model, its_trained.models[role]) for role, model in trained.models.items())
        assert one.seconds > 0
    early.close()
    late.close()


def test_scores_are_those_of_single_evaluations_whoever_is_read_first(monkeypatch):
    monkeypatch.setattr(early_calls, "MANY", 3)
    data = clients(sizes=tuple(range(3, 3 + COUNT)))
    models = [Model.init((DENSE, WIDE)[n % 2], Key(n), torch.float64) for n in range(COUNT)]
    parts = [mine.val if n % 3 else mine.test for n, mine in enumerate(data.values())]
    kinds = [Predict if n % 5 == 0 or n < 6 else Evaluate for n in range(COUNT)]
    ops = [kind(model, part) for kind, model, part in zip(kinds, models, parts, strict=True)]
    alone = [Dispatcher()([op])[0][0] for op in ops]
    for order in (range(COUNT), reversed(range(COUNT))):
        dispatcher = Dispatcher()
        dispatcher.begin(ops[:16])
        results = dispatcher(ops)
        for n in order:
            (value, seconds), wanted = results[n], alone[n]
            assert torch.equal(value, wanted) if isinstance(value, torch.Tensor) else value == wanted
            assert seconds > 0


def test_batches_are_those_of_torch_for_keys_of_any_length():
    data = split(30, Key(1))
    model = Model.init(DENSE, Key(0), torch.float64)
    for name in ("", "é", "x" * 60, "x" * 127, "x" * 400, *("y" * size for size in range(70, 90))):
        op = Train({"own": model}, SGD(CrossEntropy(), 0.1), data, BatchSchedule(12, 7), Key(3).at("client", name))
        compiled_model, reference = (Dispatcher(path=path)([op])[0][0].models["own"] for path in ("compiled", "reference"))
        for weight, value in compiled_model.params.items():
            assert torch.allclose(value, reference.params[weight], 1e-9, 1e-9)


def test_every_operation_is_told_of_and_counted():
    told = []
    early, late = Dispatcher(tick=lambda: told.append(1)), Dispatcher()
    done(early)
    done(late, early=False)
    assert early.explain() == late.explain()
    assert len(told) == 3 * COUNT


@pytest.mark.parametrize("name", ["fedme", "fedavg", "fedprox", "ditto", "fml", "apfl"])
def test_a_method_with_many_clients_gets_the_models_of_an_executor_that_is_not_early(name):
    data, federation = clients(sizes=(5,) * 30), task(archs=(DENSE,) * 30, shared=DENSE)
    method = METHODS[name](train=Training(epochs=1, batch=4, lr=0.05))
    models = []
    for executor in (Dispatcher(), NotEarly(Dispatcher())):
        server, engine = federate(method, federation, data, execute=executor)
        models.append(personal(method, server, engine))
    assert all(same(models[0][client], models[1][client]) for client in data)


def test_what_has_begun_for_somebody_who_failed_does_not_disturb_the_next():
    dispatcher, data = Dispatcher(), split(20, Key(1))

    def ends_early():
        yield (Predict(Model.init(DENSE, Key(0), torch.float64), data),)
        raise AssertionError("never asked")

    def fails():
        raise ValueError("a client's own mistake")
        yield

    with pytest.raises(ValueError, match="own mistake"):
        run_in_lockstep({number: ends_early() if number < 20 else fails() for number in range(21)}, dispatcher)
    gc.collect()
    model = Model.init(WIDE, Key(3), torch.float64)
    ops = [Predict(model, data), Evaluate(model, data)]
    logits, score = (value for value, _ in dispatcher(ops))
    assert torch.equal(logits, Dispatcher()(ops)[0][0])
    assert score == Dispatcher()(ops)[1][0]


def test_an_error_of_a_small_operation_is_raised():
    dispatcher, data = Dispatcher(), split(20, Key(1))
    wrong = data.take(torch.arange(3))
    wrong.rows[2] = 20  # no such sample
    model = Model.init(DENSE, Key(0), torch.float64)
    with pytest.raises(IndexError, match="row numbers"):
        run_in_lockstep({number: predict(model, wrong if number == 9 else data) for number in range(20)}, dispatcher)


def test_models_that_a_training_left_finite_are_known_to_be_and_others_are_not():
    data = split(12, Key(1))
    for lr, finite in ((0.1, True), (1e300, False)):
        op = Train(
            {"own": Model.init(DENSE, Key(0), torch.float64)}, SGD(CrossEntropy(), lr), data, BatchSchedule(3, 4), Key(2)
        )
        (trained, _), *_ = Dispatcher(path="compiled")([op])
        model = trained.models["own"]
        assert ("finite" in vars(model)) is finite
        assert model.finite is finite


@pytest.mark.parametrize("shares", [True, False])
def test_what_networks_have_in_common_stays_until_their_call_has_ended(shares, monkeypatch):
    """Also where a table of inputs has forgotten it, for there were too many networks."""
    heads, begin = [], compiled_networks.Head.__init__

    def noted(head, *given):
        begin(head, *given)
        heads.append(weakref.ref(head))

    monkeypatch.setattr(compiled_networks, "MOST_HEADS", 1)
    monkeypatch.setattr(compiled_networks.Head, "__init__", noted)
    data = clients()["0"].train
    models = [Model.init(arch, Key(1), torch.float64) for arch in (DENSE, WIDE, DENSE)]
    models = [replace(model, params=flat_copy(model.params)) for model in models]
    training = [Train({"own": model}, SGD(CrossEntropy(), 0.1), data, BatchSchedule(1, 4), Key(2)) for model in models]
    for operations in (training, [Predict(model, data) for model in models]):
        backend = compiled.Compiled(InputTables(torch.device("cpu")))
        assert not any(backend.supports(op) for op in operations)
        heads.clear()
        routes = [Route(backend, None, "") for _ in operations] if shares else ()
        work = compiled_jobs.together(operations, backend.tables.table(operations[0]), routes)
        call = next(work)
        gc.collect()
        assert not call.ended
        assert [head() is not None for head in heads] == [True] * 3
