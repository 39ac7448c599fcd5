"""Samples of a text are read where they stand in it, and every path computes the same with them."""

import pytest
import torch
from torch import nn

from fedme.core.data import Split, Windows
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Evaluate, Predict, Train
from fedme.execution import reference
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.input_tables import InputTables
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme_test_support import needs_compiled_code


class Recurrent(nn.Module):
    """Symbols, an LSTM, classes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 3, padding_idx=0)
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.fc = nn.Linear(5, 4)

    def forward(self, x):
        return self.fc(self.lstm(self.embedding(x.long()))[0][:, -1])


def windows(last_start=33):
    text = torch.randint(0, 11, (40,), generator=Key(1).torch()).to(torch.uint8)
    starts = torch.tensor([0, 2, 3, 3, 9, 14, 20, 21, 30, last_start])
    return Windows(text, starts, torch.arange(10) % 4, 7)


def test_windows_are_the_inputs_of_the_source():
    data = Split(windows(), torch.tensor([9, 0, 2, 3, 9]))
    table = InputTables(torch.device("cpu")).table(Predict(Model.init(Arch(Recurrent), Key(0)), data))
    assert len(table) == 10
    assert torch.equal(table.flat(data.rows), data.inputs())
    assert torch.equal(table.shaped(data.rows.view(5, 1))[:, 0], data.inputs())


@needs_compiled_code
def test_compiled_training_and_predictions_on_windows_are_the_reference():
    data = Split(windows(), torch.tensor([9, 0, 2, 3, 5, 8, 7]))
    model = Model.init(Arch(Recurrent), Key(0), torch.float64)
    op = Train({"own": model}, SGD(CrossEntropy(), 0.1, 0.9), data, BatchSchedule(2, 3), Key(2))
    engine = Dispatcher(path="compiled")
    got, wanted = engine([op])[0][0].models["own"], reference.train(op).models["own"]
    torch.testing.assert_close(dict(got.params), dict(wanted.params), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(engine([Predict(got, data)])[0][0], reference.predict(Predict(got, data)))
    assert engine([Evaluate(got, data)])[0][0].samples == 7
    assert {path for _, path, _ in engine.paths} == {"compiled"}


@pytest.mark.parametrize("path", ["workers", "stacked"])
def test_other_paths_train_and_predict_on_windows_as_the_reference(path):
    data = Split(windows(), torch.tensor([9, 0, 2, 3, 5, 8, 7]))
    models = [Model.init(Arch(Recurrent), Key(seed), torch.float64) for seed in (0, 1)]
    engine = Dispatcher(path=path)
    ops = [Train({"own": model}, SGD(CrossEntropy(), 0.1, 0.9), data, BatchSchedule(2, 3), Key(2)) for model in models]
    for op, (trained, _) in zip(ops, engine(ops), strict=True):
        wanted = reference.train(op).models["own"]
        torch.testing.assert_close(dict(trained.models["own"].params), dict(wanted.params), rtol=1e-9, atol=1e-9)
    for model, (logits, _) in zip(models, engine([Predict(model, data) for model in models]), strict=True):
        torch.testing.assert_close(logits, reference.predict(Predict(model, data)))


def test_a_window_beyond_the_text_is_an_error():
    op = Predict(Model.init(Arch(Recurrent), Key(0)), Split(windows(34), torch.arange(3)))
    with pytest.raises(IndexError, match="windows of 7 symbols must be inside the text, which has 40"):
        InputTables(torch.device("cpu")).table(op)
