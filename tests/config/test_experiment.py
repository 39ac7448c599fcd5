import json
import string
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fedme.config.experiment import ConfigError, load, override, parse, presets, read_preset, to_toml
from fedme.config.hints import hints
from fedme.methods import METHODS

EXAMPLE = """
name = "fedme-digits"
seed = 0
rounds = 30
[method]
name = "fedme"
clusters = {0 = 1, 15 = 2, 22 = 3}
[data]
name = "digits"
unlabeled = 100
[partition]
name = "dirichlet"
clients = 20
alpha_label = 0.5
alpha_size = 10.0
[models]
pool = ["mlr", "dnn-16", "dnn-64", "cnn-small"]
assign = "best-local"
[train]
epochs = 2
batch = 20
lr = 0.1
momentum = 0.9
[engine]
name = "inprocess"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(EXAMPLE)
    return path


def test_the_example_is_parsed_as_written(file):
    experiment, notes = load(file)
    assert notes == []
    assert experiment.method_name == "fedme"
    assert experiment.method.clusters == {0: 1, 15: 2, 22: 3}
    assert experiment.method.train.momentum == 0.9
    assert experiment.partition.alpha_size == 10.0
    assert experiment.data.unlabeled == 100


def test_overrides_of_any_key(file):
    words = ["rounds=5", "seed=3", "output=DIR", "method.name=fml", "partition.alpha_label=0.1", "models.pool=['mlr']"]
    experiment, notes = load(file, words)
    settings = experiment.settings
    assert (settings.rounds, settings.seed, settings.output) == (5, 3, "DIR")
    assert experiment.method_name == "fml"
    assert experiment.partition.alpha_label == 0.1
    assert settings.models.pool == ("mlr",)
    assert notes == ["method.name=fml: dropped clusters of fedme"]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_replace_another(file, name):
    experiment, _ = load(file, [f"method.name={name}", "data.public=20"])
    assert experiment.method_name == name


def test_a_setting_of_the_new_method_may_come_before_or_after_its_name(file):
    for words in (["method.beta=0.2", "method.name=fml"], ["method.name=fml", "method.beta=0.2"]):
        assert load(file, words)[0].method.beta == 0.2


def test_short_names_of_tables(file):
    assert load(file, ["method=local", "partition=iid"])[0].partition_name == "iid"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method.cluster=3"], "method.cluster: unknown key; did you mean 'clusters'?"),
        (["train.lr=fast"], "train.lr: must be a number, got 'fast'"),
        (["train.lr=-1"], "train.lr: must be > 0"),
        (["rounds=0"], "rounds: must be >= 1, got 0"),
        (["rounds=1.5"], "rounds: must be an integer"),
        (["round=3"], "round: unknown key; did you mean 'rounds'?"),
        (["method.name=fedmee"], "unknown method 'fedmee'; did you mean 'fedme'?"),
        (["data.name=digit"], "unknown data 'digit'; did you mean 'digits'?"),
        (["partition.name=dirichlett"], "did you mean 'dirichlet'?"),
        (["data.vall=0.1"], "data.vall: unknown key; did you mean 'val'?"),
        (["data.val=2"], "data.val: must be >= 0 and < 1, got 2.0"),
        (["partition.alpha_label=-1"], "alpha_label"),
        (["method.clusters={0=0}"], "method.clusters"),
        (["method.clusters={a=1}"], "method.clusters.a: this key must be an integer"),
        (["method.adopt=speed"], "method.adopt: must be one of loss"),
        (["method.adopt=nowhere:cost"], "method.adopt: cannot import 'nowhere:cost'"),
        (["method.name=nowhere:Method"], "method.name: cannot import"),
        (["method.name=string:Template"], "is not a method"),
        (["method.train={}"], "these settings belong to the table [train]"),
        (["partition=natural"], "no natural clients"),
        (["engine.name=flour"], "engine.name: must be one of inprocess, ray, flower, got 'flour'"),
        (["models.pool=[]"], "models.pool: must name at least one"),
        (["train.cohort=0"], "train.cohort: must be >= 1"),
        (["train.optimizer=adm"], "train.optimizer: must be one of sgd, adam, adamw, got 'adm'"),
        (
            ["train.optimizer=adam", "train.momentum=0.9"],
            "train.momentum: is a setting of sgd, got 0.9 with optimizer = 'adam'",
        ),
        (["train.momentum=0", "train.nesterov=true"], "train.nesterov: needs momentum"),
        (["train.lr_schedule=cosine", "train.lr_decay_at=[0.5]"], "train.lr_decay_at: is for lr_schedule = 'step'"),
        (["rounds=3", "train.warmup=3"], "train.warmup: must be < rounds, which is 3, got 3"),
        (["train.last_batch=dropped"], "train.last_batch: must be one of keep, drop, scale, got 'dropped'"),
        (
            ["method=pfml", "train.optimizer=adam", "train.momentum=0"],
            "train.optimizer: method 'pfml' defines its own step; train.optimizer = 'adam' has no meaning there",
        ),
        (["method=pfedme", "train.optimizer=adamw", "train.momentum=0"], "method 'pfedme' defines its own step"),
        (["rounds"], "overrides have the form key=value"),
        (["seed.x=1"], "seed is not a table"),
    ],
)
def test_errors_name_the_key_and_the_fix(file, words, message):
    with pytest.raises(ConfigError) as error:
        load(file, words)
    assert message in str(error.value)


def test_defaults_that_depend_on_the_optimizer_are_in_the_configuration(file):
    adamw = load(file, ["train.optimizer=adamw", "train.momentum=0"])[0].plain()["train"]
    assert (adamw["lr"], adamw["weight_decay"]) == (0.1, 0.01)  # the file says which rate
    adamw = load("pfml-mnist-mlr", ["method=fedavg", "train={optimizer='adamw'}"])[0].plain()["train"]
    assert (adamw["lr"], adamw["weight_decay"], adamw["betas"]) == (0.001, 0.01, [0.9, 0.999])
    sgd = load("pfml-mnist-mlr", ["train={batch=5}"])[0].plain()["train"]
    assert (sgd["lr"], sgd["weight_decay"]) == (0.1, 0.0)


def test_settings_without_effect_are_pointed_out(file):
    words = ["train.lr_schedule=cosine", "finetune.epochs=2", "rounds=20"]
    assert hints(load(file, words)[0]) == [
        "fine-tuning has the learning rate of the last round, 0.00062; train.lr_min raises it"
    ]
    assert hints(load(file, [*words, "train.lr_min=0.02"])[0]) == []
    assert hints(load(file, ["train.last_batch=scale"])[0]) == []
    private = hints(load(file, ["train.last_batch=scale", "privacy.noise_multiplier=1.0"])[0])
    assert private == ["batches are Poisson samples under [privacy] and have no last one: train.last_batch has no effect"]


def test_errors_of_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="neither a file nor a preset; did you mean 'digits-fedme'"):
        load("digit-fedme")
    bad = tmp_path / "bad.toml"
    bad.write_text("rounds = = 3")
    with pytest.raises(ConfigError, match="bad.toml: "):
        load(bad)
    bad.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="bad.toml: "):
        load(bad)


def test_user_defined_functions_and_methods(file, tmp_path, monkeypatch):
    (tmp_path / "user_code.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedme.methods.fedavg import FedAvg\n"
        "def cost(candidate):\n    return candidate.parameters\n"
        "@dataclass(frozen=True)\nclass Slow(FedAvg):\n    rate: float = 0.5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment, _ = load(file, ["method.adopt=user_code:cost"])
    assert experiment.method.adopt.__name__ == "cost"
    again = parse(experiment.plain())
    assert again.method.adopt is experiment.method.adopt
    own, notes = load(file, ["method.name=user_code:Slow", "method.rate=0.25"])
    assert (own.method_name, own.method.rate) == ("user_code:Slow", 0.25)
    assert "dropped clusters" in notes[0]


@pytest.mark.parametrize("name", presets())
def test_presets_load_and_survive_a_round_trip(name, tmp_path):
    experiment, _ = load(name)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(experiment.plain()))
    again, _ = load(path)
    assert again.plain() == experiment.plain()
    assert (again.method, again.partition, again.dataset) == (experiment.method, experiment.partition, experiment.dataset)


@pytest.mark.parametrize("name", presets())
def test_the_resolved_configuration_of_a_preset_does_not_change_by_itself(name):
    """A new default must not change what a preset computes: `python tools/pin_presets.py` records an intended change."""
    pinned = json.loads((Path(__file__).parent / "presets.json").read_text())
    assert load(name)[0].plain() == pinned[name]
    if not name.startswith(("digits-", "scale-")):  # the papers' presets name what has a default that may change
        raw, _ = read_preset(name)
        assert raw["data"]["stratify"] is False
        assert raw["train"]["last_batch"] == "keep"
        assert raw["models"]["update_bn"] is True


def test_the_partition_may_have_its_own_seed(file):
    same = [load(file, [f"seed={seed}", "partition.seed=7"])[0] for seed in (1, 2)]
    assert same[0].partition_key == same[1].partition_key != load(file, ["seed=1"])[0].partition_key
    assert load(file, ["seed=7"])[0].partition_key == same[0].partition_key
    assert parse(same[0].plain()).partition.seed == 7
    assert "seed" not in load(file)[0].plain()["partition"]


def test_the_default_is_the_demo():
    assert load(None)[0].settings.name == "digits-fedme"


def test_none_unsets_a_key(file):
    experiment, _ = load(file, ["partition.alpha_size=none"])
    assert experiment.partition.alpha_size is None
    assert parse(experiment.plain()).partition.alpha_size is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable, max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abmnp.", max_size=4), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(
    ["name", "seed", "rounds", "method", "data", "partition", "models", "train", "finetune", "engine", "output", "x"]
)


@given(st.dictionaries(keys, values, max_size=4))
def test_any_data_is_parsed_or_rejected(raw):
    try:
        parse(raw, "file")
    except ConfigError as error:
        assert str(error).startswith("file: ")


@given(st.lists(st.text("abcdet.=0[]{}\"'- ", max_size=12), max_size=3))
def test_any_overrides_are_applied_or_rejected(words):
    raw = {"method": {"name": "fedme"}, "train": {"lr": 0.1}}
    try:
        override(raw, words)
        parse(raw)
    except ConfigError:
        pass
