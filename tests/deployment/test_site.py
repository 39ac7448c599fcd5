"""The files of a site: settings, prepared data, private state, audit log; and which models it accepts."""

import json
import tempfile
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given, strategies as st

from fedme.config.experiment import ConfigError, load
from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.core.method import Member, Round, TaskError
from fedme.core.model import Model
from fedme.core.typed import TypedError, build
from fedme.datasets.data_errors import DataError
from fedme.datasets.site_files import Sites
from fedme.deployment import site_app, transfer_log
from fedme.deployment.handshake import Handshake, admit, create_handshake, differing_keys
from fedme.deployment.node import command
from fedme.deployment.operator_folder import Federation, Settings
from fedme.deployment.provisioning import write
from fedme.deployment.site_data import client_data
from fedme.deployment.site_settings import Site, agreed_task, with_members
from fedme.deployment.site_state import PrivateState, check_ledger, exchanges_before
from fedme.federation.flower.message_content import MessageContent
from fedme.federation.reply_validation import check_sent
from fedme.learning.accountant import Ledger, PrivacyCost, epsilon
from fedme.methods.fedme.exchange import acceptance
from fedme.methods.fedme.fedme import Down
from fedme.methods.local import State
from fedme.methods.shared_model import SharedModel, TrainedCopy
from fedme_test_support import DENSE, LINEAR, task


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "fed", None, ["a", "b"], Settings())
    for name in "ab":
        x = np.arange(40 * 64, dtype="uint8").reshape(40, 1, 8, 8) % 16
        np.savez(tmp_path / "fed" / "sites" / name / "data.npz", x=x, y=np.arange(40) % 10)
    return tmp_path / "fed"


def site(folder):
    return Site.read(folder / "sites" / "a" / "site.toml")


def edited(folder, old, new):
    path = folder / "sites" / "a" / "site.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return Site.read(path)


def test_provisioning_is_complete_and_secrets_are_readable_by_their_owner_only(folder):
    assert Federation.read(folder).settings == Settings()
    for secret in ("server/ca.key", "server/server.key", "server/superexec.secret", "sites/a/key"):
        assert (folder / secret).stat().st_mode & 0o777 == 0o600
    before = (folder / "sites/a/key").read_bytes(), (folder / "server/ca.crt").read_bytes()
    assert sorted(name.split("/")[1] for name in write(folder, None, ["a", "c"], Settings())) == ["c"] * 6
    assert before == ((folder / "sites/a/key").read_bytes(), (folder / "server/ca.crt").read_bytes())
    with pytest.raises(ConfigError, match="invalid site name '../x'"):
        write(folder, None, ["../x"], Settings())
    (folder / "odd.toml").write_text('[data]\nname = "digits"\n')
    with pytest.raises(ConfigError, match="data.name is 'digits'; a deployment needs 'sites'"):
        write(folder / "odd", folder / "odd.toml", ["a"], Settings())
    assert not (folder / "odd").exists()
    with pytest.raises(ConfigError, match="no federation here"):
        Federation.read(folder / "sites")


def test_common_samples_come_with_the_experiment(folder, tmp_path):
    text = (folder / "experiment.toml").read_text()
    (tmp_path / "own.toml").write_text(text.replace("[data]", '[data]\npublic_file = "public.npz"\nunlabeled_file = "u.npz"'))
    for name in ("public.npz", "u.npz"):
        np.savez(tmp_path / name, x=np.zeros((10, 64)), y=np.arange(10))
    made = write(tmp_path / "other", tmp_path / "own.toml", ["a"], Settings())
    assert {name for name in made if name.endswith(".npz")} == {"public.npz", "u.npz", "sites/a/public.npz"}


def test_nothing_is_insecure_unless_asked(folder):
    here = Federation.read(folder)
    for words in (here.superlink(), here.superexec(), here.reverse_proxy(), command(site(folder))):
        assert "--insecure" not in words
        assert any(str(word).endswith("ca.crt") for word in words)
    assert "--enable-supernode-auth" in here.superlink()
    assert here.superlink()[here.superlink().index("--host") + 1] == "127.0.0.1"
    abroad = Federation(folder, Settings(host="fed.example.org", listen="0.0.0.0"))
    assert abroad.superlink()[abroad.superlink().index("--host") + 1] == "127.0.0.1"  # whatever sites connect to
    assert abroad.reverse_proxy()[abroad.reverse_proxy().index("--host") + 1] == "0.0.0.0"
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(TypedError, match="must be an address that sites can connect to"):
            build(Settings, {"host": host})


def test_data_is_read_once_and_again_when_it_changes(folder):
    here = Site.read(folder / "sites/a/site.toml")
    data = client_data(here)
    assert [len(part) for part in (data.train, data.val, data.test)] == [24, 6, 10]
    assert data.train.inputs().max() <= 15 / 16
    written = (here.state / "data.safetensors").stat().st_mtime_ns
    again = client_data(here)
    assert torch.equal(again.train.rows, data.train.rows)
    assert (here.state / "data.safetensors").stat().st_mtime_ns == written
    np.savez(folder / "sites/a/data.npz", x=np.zeros((20, 64)), y=np.zeros(20, dtype=int))
    assert len(client_data(here).train) == 12
    np.savez(folder / "sites/a/data.npz", x=np.zeros((20, 64)), y=np.full(20, 11))
    with pytest.raises(DataError, match=r"label 11 is not in the label space"):
        client_data(here)
    renamed = edited(folder, '# rename = { yes = "1" }', 'rename = { 11 = "1" }')
    assert client_data(renamed).train.y.unique().tolist() == [1]
    (folder / "sites/a/data.npz").unlink()
    with pytest.raises(DataError, match="No such file"):
        client_data(renamed)


def sites(*shape):
    return Sites(shape, ("yes", "no"))


def test_a_table_and_what_can_be_wrong_with_it(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("age,dose,ill,note\n1,2,yes,x\n3,4.5,no,\n")  # an empty cell in an unused column
    x, labels = sites(2).read(path, "ill", ["dose", "age"])
    assert x.tolist() == [[2, 1], [4.5, 3]]
    assert labels == ["yes", "no"]
    assert sites(2).read(path, None, ["age", "dose"])[1] == []
    for shape, label, features, message in (
        ((2,), "ill", ("age", "note"), "sample 1 \\(counted from 0\\) in 'note' is empty"),
        ((3,), "ill", ("age", "dose"), "samples must have 3 numbers for shape \\[3\\], got 2"),
        ((1,), "sick", ("age",), "there is no column 'sick'"),
        ((1,), "ill", ("aage",), "there is no column 'aage'.*'age'"),
    ):
        with pytest.raises(DataError, match=message):
            sites(*shape).read(path, label, features)
    path.write_text("age,ill,note\n1,yes,x\n")
    with pytest.raises(DataError, match="column 'note', sample 0 \\(counted from 0\\): must be a number, got 'x'"):
        sites(2).read(path, "ill")


def test_arrays_and_what_can_be_wrong_with_them(tmp_path):
    with pytest.raises(DataError, match=r"data.pkl\): unsupported file type; use .csv, .tsv, .parquet, .npz"):
        sites(1).read(tmp_path / "data.pkl", "y")
    np.savez(tmp_path / "x.npz", x=np.arange(8, dtype="uint8").reshape(2, 4), y=[1, 0])
    x, labels = sites(1, 2, 2).read(tmp_path / "x.npz", "y")
    assert (x.dtype, tuple(x.shape), labels) == (torch.uint8, (2, 1, 2, 2), ["1", "0"])
    for message, arrays in (
        ("pickled objects", {"x": np.array([{"a": 1}], dtype=object), "y": [1]}),
        ("is NaN", {"x": [[float("nan")]], "y": [1]}),
        ("there is no column 'y'", {"x": [[1.0]]}),
        ("one array besides the label is required, got x, z", {"x": [[1.0]], "y": [1], "z": [[1.0]]}),
        ("2 samples, but 1 labels", {"x": [[1.0], [2.0]], "y": [1]}),
    ):
        np.savez(tmp_path / "odd.npz", **arrays)
        with pytest.raises(DataError, match=message):
            sites(1).read(tmp_path / "odd.npz", "y")
    with (tmp_path / "odd.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="not a readable npz file"):  # a single array
        sites(1).read(tmp_path / "odd.npz", "y")


def test_a_folder_of_images_is_looked_at_again_when_one_changes(folder):
    from PIL import Image

    here = edited(folder, 'file = "data.npz"', 'file = "images"')
    for i in range(20):
        path = folder / "sites/a/images" / str(i % 10) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), i, dtype="uint8")).save(path)
    assert len(client_data(here).train) == 12
    (folder / "sites/a/images/3/13.png").unlink()
    assert len(client_data(here).train) == 11


@given(st.binary(max_size=200))
def test_a_file_of_anything_is_an_error_in_words(content):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("x.npz", "x.csv"):
            path = Path(folder) / name
            path.write_bytes(content)
            with pytest.raises(DataError):
                sites(2).read(path, "y")


def test_private_state_keeps_the_version_before(tmp_path):
    private = PrivateState(tmp_path, "abc-1")
    states = [State(Model.init(DENSE, Key(i)), {}, waited=i) for i in range(4)]
    archs = {DENSE.name: DENSE}
    assert private.read(State, archs, 5) == (0, None)
    for version, state in enumerate(states, 1):
        private.write(version, state)
    assert private.versions() == [3, 4]
    version, state = private.read(State, archs, 9)
    assert (version, state.waited) == (4, 3)
    assert torch.equal(state.model.params["0.weight"], states[3].model.params["0.weight"])
    assert private.read(State, archs, 3)[0] == 3  # the server repeats a round
    private.write(4, states[0])
    assert private.read(State, archs, 9)[1].waited == 0
    with pytest.raises(RunError, match="damaged: .*unknown architecture 'dense'"):
        private.read(State, {}, 9)
    for name in ("../up", "", "A" * 65):
        with pytest.raises(TypedError):
            PrivateState(tmp_path, name)
    assert exchanges_before(("one", "two"), Round(3, 9, "two")) == 7


def test_a_site_lets_in_what_it_says(folder):
    task, archs = site(folder).task()
    assert list(task.members) == ["a"]
    assert archs.keys() == {"mlr", "dnn-32"}
    small = edited(folder, "# max_parameters = 100000", "max_parameters = 700")
    assert small.task()[1].keys() == {"mlr"}
    picky = edited(folder, 'accept = "all" ', "accept = []")
    assert picky.member().accepts == ()
    assert picky.task()[1].keys() == {"mlr"}  # its own, and the shared one
    with pytest.raises(ConfigError, match="data.fil: unknown key; did you mean 'file'"):
        edited(folder, "file =", "fil =")


def test_a_handshake_contains_no_data_and_no_paths(folder):
    here = site(folder)
    handshake = create_handshake(here, "run-1", here.experiment.plain(), client_data(here))
    assert handshake == Handshake("a", "mlr", tuple("0123456789"), 24, 0, None, None, None, handshake.fedme)
    received = here.experiment.plain() | {"rounds": 3, "train": here.experiment.plain()["train"] | {"lr": 9.0}}
    with pytest.raises(ConfigError, match="differs from the one this site agreed to: rounds, train.lr"):
        create_handshake(here, "run-1", received, client_data(here))
    assert differing_keys({"name": 1, "a": {"b": 2}}, {"name": 2, "a": {}}) == ["a.b"]


def test_the_file_of_unlabeled_samples_has_one_name_for_all(folder):
    for path in (folder / "experiment.toml", folder / "sites/a/experiment.toml"):
        path.write_text(path.read_text().replace("[data]", '[data]\nunlabeled_file = "unlabeled.npz"'))
    received = load(folder / "experiment.toml")[0].plain()
    assert create_handshake(site(folder), "run-1", received, client_data(site(folder))).client == "a"
    assert received["data"]["unlabeled_file"] == "unlabeled.npz"


def test_only_methods_that_send_models_need_a_catalogue(folder):
    handshake = create_handshake(site(folder), "run-1", site(folder).experiment.plain(), client_data(site(folder)))
    unknown = Handshake("a", "mynets:Own", handshake.labels, 24, 0, None, None, None, handshake.fedme)
    for method, allowed in (("fedme", False), ("fml", True), ("pfml", True), ("local", True)):
        experiment, _ = load(folder / "experiment.toml", [f"method.name={method}"])
        base, archs = agreed_task(experiment)
        assert admit(handshake, experiment, base, archs).arch is archs["mlr"]
        if allowed:
            assert admit(unknown, experiment, base, archs).arch.name == "mynets:Own"
        else:
            with pytest.raises(TaskError, match="unknown architecture 'mynets:Own'.* known: mlr, dnn-32"):
                admit(unknown, experiment, base, archs)
    with pytest.raises(TaskError, match="install the same version"):
        admit(Handshake(**(vars(handshake) | {"fedme": "9.9"})), experiment, base, archs)
    for samples in (0, -5, 10**15):
        with pytest.raises(TaskError, match=f"training samples must be >= 1 and <= .*, got {samples}"):
            admit(Handshake(**(vars(handshake) | {"samples": samples})), experiment, base, archs)


def test_who_lends_to_whom():
    experiment = Member("a", LINEAR, tuple("abcd"), lends_to=("b",)), Member("b", DENSE, tuple("abcd"), accepts=("linear",))
    federation = with_members(task(), {**{m.id: m for m in experiment}, "c": Member("c", DENSE, tuple("abcd"))})
    models = {name: Model.init(member.arch, Key(0)) for name, member in federation.members.items()}
    fits = acceptance(federation, models)
    assert fits("b", "a")
    assert not fits("c", "a")  # a lends to b only
    assert not fits("b", "c")  # b takes linear models only
    assert fits("c", "b")


def test_every_transfer_is_a_line(tmp_path):
    own, guest = Model.init(LINEAR, Key(0)), Model.init(DENSE, Key(1))
    transfer_log.record(tmp_path, "received", "server", "run-1", 3, Down(own, guest, "b", 1))
    transfer_log.record(tmp_path, "sent", "server", "run-1", 3, None)
    first, second = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert first["models"] == [{"as": "own", "arch": "linear"}, {"as": "guest", "arch": "dense"}]
    assert first["with"] == {"lender": "b", "cluster": 1}
    assert first["bytes"] > 100
    assert (second["bytes"], second["models"]) == (0, [])


def test_a_private_site_never_answers_twice_with_the_same_noise(folder):
    path = folder / "sites" / "a" / "site.toml"
    agreed_to = path.with_name("experiment.toml")
    changed = {"rounds": 2, "method": {"name": "fedavg"}, "models": {"pool": ["mlr"]}, "privacy": {"epsilon": 4.0}}
    agreed_to.write_text(tomli_w.dumps(tomllib.loads(agreed_to.read_text()) | changed))
    own_site = Site.read(path)
    task, archs = own_site.task()
    model = Model.init(task.shared, Key(0))

    def ask():
        down = MessageContent.of(run="r", when=Round(0, 2), down=SharedModel(model))
        reply = site_app.train(down, {"site": str(path)})
        return reply.read("up", TrainedCopy, archs).model, reply.read("spent", Ledger)

    (first, once), (second, twice) = ask(), ask()
    assert not torch.equal(
        first.params["1.weight"], second.params["1.weight"]
    )  # otherwise the server could remove the noise by asking twice
    assert [cost.steps for cost in twice] == [2 * cost.steps for cost in once]
    assert PrivateState(own_site.state, "r").spent() == twice  # the site's own ledger counts, not the server's
    assert 3.9 < epsilon(twice, 1e-5) <= 4.0
    with pytest.raises(site_app.SiteError, match="beyond privacy.epsilon = 4"):
        ask()
    (PrivateState(own_site.state, "r").folder / "privacy.json").write_text("[1]")
    with pytest.raises(site_app.SiteError, match="RunError"):
        ask()


def test_a_server_looks_at_short_ledgers_only():
    many = tuple(PrivacyCost(0.5, 1.0 + i, 1) for i in range(17))
    assert check_ledger(many[:16]) == many[:16]
    with pytest.raises(TypedError, match="got 17"):
        check_ledger(many)


def test_a_site_refuses_what_cannot_be_meant_for_it(folder):
    here = site(folder)
    setting, archs = here.task()
    method, model = here.experiment.method, Model.init(archs["mlr"], Key(0))
    check_sent(method, setting, Down(model), Round(0, 3))
    broken = model.with_params({name: value * float("nan") for name, value in model.params.items()})
    for down, when in ((Down(broken), Round(0, 3)), (Down(model), Round(3, 3)), (Down(model), Round(0, 3, "digest"))):
        with pytest.raises(TypedError):
            check_sent(method, setting, down, when)


def test_damaged_prepared_data_is_made_again(folder):
    here = site(folder)
    expected = client_data(here).train.inputs()
    path = here.state / "data.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert torch.equal(client_data(here).train.inputs(), expected)
    assert torch.equal(client_data(here).train.inputs(), expected)
