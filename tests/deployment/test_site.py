"""The files of a site: settings, prepared data, private state, audit log; and which models it accepts."""

import io
import json
import shutil
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given, strategies as st

from fedme.artifacts import model_choice, outputs
from fedme.artifacts.saved_models import folder_of
from fedme.config.experiment import ConfigError, load
from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.core.method import Member, Round, TaskError
from fedme.core.model import Model
from fedme.core.typed import TypedError, build
from fedme.datasets.data_errors import DataError
from fedme.datasets.site_files import Sites
from fedme.deployment import append_only, site_app, transfer_log
from fedme.deployment.handshake import Handshake, admit, create_handshake, differing_keys
from fedme.deployment.node import check, command, run as run_node
from fedme.deployment.operator_folder import Federation, Settings
from fedme.deployment.privacy_account import PrivacyAccount
from fedme.deployment.provisioning import write
from fedme.deployment.site_data import client_data
from fedme.deployment.site_settings import Site, agreed_task, with_members
from fedme.deployment.site_state import PrivateState, check_ledger, exchanges_before
from fedme.federation.client_work import Finetune, ModelScore
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
        ((2,), "ill", ("age", "note"), "sample 0 \\(counted from 0\\) in 'note' must be a number, got 'x' \\(2 of 2"),
        ((3,), "ill", ("age", "dose"), "samples must have 3 numbers for shape \\[3\\], got 2"),
        ((1,), "sick", ("age",), "there is no column 'sick'"),
        ((1,), "ill", ("aage",), "there is no column 'aage'.*'age'"),
    ):
        with pytest.raises(DataError, match=message):
            sites(*shape).read(path, label, features)
    path.write_text("age,ill,note\n1,yes,x\n")
    with pytest.raises(DataError, match="sample 0 \\(counted from 0\\) in 'note' must be a number, got 'x'"):
        sites(2).read(path, "ill")


def test_gaps_and_ranges_of_the_agreed_columns(folder):
    """A site fills gaps with values of its own training part, keeps them, and is told of a column in another unit."""
    experiment = folder / "sites/a/experiment.toml"
    agreed = {"shape": [2], "columns": ["age", "chol"], "ranges": {"chol": [100, 500]}, "missing": "median"}
    config = tomllib.loads(experiment.read_text())
    config["data"] = {"name": "sites", "classes": ["no", "yes"], **agreed}
    config["models"] = {"pool": ["mlr"]}
    experiment.write_text(tomli_w.dumps(config))
    draw = np.random.default_rng(0)
    rows = [
        f"{draw.normal(50, 9):.1f},{'?' if i % 5 == 0 else round(draw.normal(6, 1), 2)},{i},{'no' if i % 3 else 'yes'}"
        for i in range(40)
    ]
    (folder / "sites/a/data.csv").write_text("\n".join(["Age,cholesterol,id,ill", *rows]) + "\n")
    path = folder / "sites/a/site.toml"
    settings = tomllib.loads(path.read_text())
    settings["data"] = {"file": "data.csv", "label": "ill", "features": ["Age", "cholesterol"]}
    settings["model"] = "mlr"
    path.write_text(tomli_w.dumps(settings))
    here = Site.read(path)
    data = client_data(here)
    assert torch.isfinite(data.train.source.x).all()
    value = data.preprocessing["columns"][1]["value"]
    chol = data.train.source.x[:, 1]
    observed = [row for row in data.train.rows.tolist() if row % 5]
    assert value == pytest.approx(chol[observed].quantile(0.5).item())
    assert chol[0].item() == pytest.approx(value)
    assert client_data(here).preprocessing == data.preprocessing  # from the prepared file
    summary, note = check(here).splitlines()
    assert "24 train" in summary
    assert note.startswith("note: 'chol' is mostly between 4.")
    assert "the experiment says 100 to 500" in note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ("a",)}, "columns: must name 2 columns once each"),
        ({"ranges": {"a": (0, 1)}}, "ranges: 'a' is not in columns, which are not given"),
        ({"missing": "median"}, "missing: needs the names of the columns"),
        ({"columns": ("a", "b"), "fill": {"a": 1.0}}, "fill: gaps are errors"),
    ],
)
def test_agreed_columns_must_fit(options, message):
    with pytest.raises(DataError, match=message):
        Sites((2,), ("yes", "no"), **options)


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
    assert admit(Handshake(**(vars(handshake) | {"samples": 0})), experiment, base, archs).id == "a"  # it does not tell
    for samples in (-5, 10**15):
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


def private(folder, **changed):
    """Site a with an experiment of two private rounds, and a function that asks it for one."""
    path = folder / "sites" / "a" / "site.toml"
    agreed_to = path.with_name("experiment.toml")
    settings = {"rounds": 2, "method": {"name": "fedavg"}, "models": {"pool": ["mlr"]}, "privacy": {"epsilon": 4.0}} | changed
    agreed_to.write_text(tomli_w.dumps(tomllib.loads(agreed_to.read_text()) | settings))
    own_site = Site.read(path)
    task, archs = own_site.task()
    model = Model.init(task.shared, Key(0))

    def ask(run="r", t=0, total=2):
        down = MessageContent.of(run=run, when=Round(t, total), down=SharedModel(model))
        reply = site_app.train(down, {"site": str(path)})
        return reply.read("up", TrainedCopy, archs).model, reply.read("spent", Ledger)

    return own_site, ask


def greet(own_site, run):
    """A handshake for a new run of the experiment that the site agreed to."""
    request = MessageContent.of(run=run, config=own_site.experiment.plain())
    return site_app.handshake(request, {"site": str(own_site.folder / "site.toml")})


def test_a_private_site_never_answers_twice_with_the_same_noise(folder):
    own_site, ask = private(folder)
    (first, once), (second, twice) = ask(), ask()
    assert not torch.equal(
        first.params["1.weight"], second.params["1.weight"]
    )  # otherwise the server could remove the noise by asking twice
    assert [cost.steps for cost in twice] == [2 * cost.steps for cost in once]
    account = PrivacyAccount.of(own_site)
    assert account.ledger("r") == twice  # the site's own account counts, not the server's
    assert 3.9 < epsilon(twice, 1e-5) <= 4.0
    with pytest.raises(site_app.SiteError, match="beyond privacy.epsilon = 4"):
        ask()
    assert account.ledger() == twice, "nothing left the site, so nothing was spent"
    account.path.write_text("[1]\n")
    with pytest.raises(site_app.SiteError, match="RunError"):
        ask()


def test_a_budget_belongs_to_the_site_and_not_to_a_run(folder):
    """The server names the runs: a new name, a new data file or a deleted state must not start from zero."""
    own_site, ask = private(folder)
    greet(own_site, "first")
    for t in (0, 1):
        ask("first", t)
    spent = PrivacyAccount.of(own_site).epsilon()
    assert 3.9 < spent <= 4.0
    shutil.rmtree(own_site.state)
    np.savez(own_site.folder / "data.npz", x=np.ones((40, 64)), y=np.arange(40) % 10)
    message = r"from epsilon 3\.\d+ to [5-9]\.\d+, beyond its limit of 4; the site can open another account for new data only"
    with pytest.raises(site_app.SiteError, match=message):
        greet(own_site, "second")  # before it starts
    with pytest.raises(site_app.SiteError, match=message):
        ask("second")  # also without a handshake
    assert PrivacyAccount.of(own_site).epsilon() == spent
    (own_site.folder / "site.toml").write_text((own_site.folder / "site.toml").read_text().replace("127.0.0.1:", "127.0.0.9:"))
    with pytest.raises(site_app.SiteError, match=message):  # another server
        greet(own_site, "third")


def test_a_site_sets_a_limit_for_all_runs(folder):
    edited(folder, "# epsilon = 8.0", "epsilon = 5.0")
    own_site, ask = private(folder)
    for t in (0, 1):
        ask("first", t)
    greet(own_site, "first")  # a run that resumes, or a node that reconnects
    with pytest.raises(site_app.SiteError, match=r"beyond its limit of 5"):
        greet(own_site, "second")
    smaller, ask = private(folder, privacy={"epsilon": 1.0})
    greet(smaller, "second")
    for t in (0, 1):
        ask("second", t)
    account = PrivacyAccount.of(smaller)
    assert 4.0 < account.epsilon() < 5.0, "the costs of both runs compose: less than the sum of their epsilons"
    assert [run["run"] for run in account.runs()] == ["first", "second"]
    free, _ = private(folder)
    path = free.folder / "experiment.toml"
    path.write_text(tomli_w.dumps({key: value for key, value in tomllib.loads(path.read_text()).items() if key != "privacy"}))
    with pytest.raises(site_app.SiteError, match=r"limits what leaves it to epsilon 5, but the experiment has no \[privacy\]"):
        greet(Site.read(free.folder / "site.toml"), "third")


def test_costs_are_on_disk_before_the_reply_and_the_limit_holds_there_too(folder, monkeypatch):
    own_site, ask = private(folder)
    written = []
    monkeypatch.setattr(site_app.transfer_log, "record", lambda *given: written.append(PrivacyAccount.of(own_site).lines()))
    ask()
    assert [len(lines) for lines in written] == [0, 1]  # when the request and when the reply were logged
    monkeypatch.setattr(PrivacyAccount, "require_room", lambda *given: None)
    ask("other", 1)
    with pytest.raises(site_app.SiteError, match="beyond its limit of 4; nothing was sent"):
        ask("third")


def test_only_the_site_opens_another_account(folder, fedme, monkeypatch):
    own_site, ask = private(folder)
    file = own_site.folder / "site.toml"
    for t in (0, 1):
        ask("first", t)
    code, out, err = fedme("deploy", "budget", file, "--json")
    shown = json.loads(out)
    assert (code, shown["limit"], shown["delta"]) == (0, 4.0, 1e-5)
    assert 3.9 < shown["epsilon"] <= 4.0
    assert [run["answers"] for run in shown["runs"]] == [2]
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    code, out, err = fedme("deploy", "budget", file, "--new-data", "--reason", "patients of 2027")
    assert code != 0
    assert json.loads(fedme("deploy", "budget", file, "--json")[1])["epsilon"] == shown["epsilon"]
    code, out, err = fedme("deploy", "budget", file, "--new-data", "--reason", "patients of 2027", "--yes")
    assert code == 0, err
    after = json.loads(fedme("deploy", "budget", file, "--json")[1])
    assert (after["epsilon"], after["runs"]) == (0.0, [])
    assert [(line["new_data"], line["closed_at"]) for line in after["closed"]] == [("patients of 2027", shown["epsilon"])]
    greet(own_site, "second")
    assert len(PrivacyAccount.of(own_site).path.read_text().splitlines()) == 3, "nothing is ever deleted"


def test_a_site_that_has_left_answers_nothing_until_it_comes_back(folder, fedme):
    own_site, ask = private(folder)
    greet(own_site, "r")
    code, _, err = fedme("deploy", "leave", own_site.folder / "site.toml", "--reason", "the study is over")
    assert (code, "a has left" in err, "What was sent before remains" in err) == (0, True, True)
    for request in (lambda: greet(own_site, "r"), ask):
        with pytest.raises(site_app.SiteError, match="this site has left the federation"):
            request()
    with pytest.raises(ConfigError, match=r"to come back, delete left.jsonl in its records"):
        run_node(own_site, print)
    assert "the study is over" in (own_site.records / "left.jsonl").read_text()
    (own_site.records / "left.jsonl").unlink()
    greet(own_site, "r")


def test_a_site_that_nobody_knows_cannot_be_removed(folder, fedme):
    code, _, err = fedme("deploy", "remove", folder, "x")
    assert (code, "no site is called 'x'; there are a, b" in " ".join(err.split())) == (2, True)
    assert (folder / "sites" / "a" / "key.pub").exists()
    fedme("deploy", "remove", folder, "a")  # it was never registered
    assert not (folder / "sites" / "a" / "key.pub").exists()
    assert Federation.read(folder).keys().keys() == {"b"}


@pytest.mark.parametrize("name", ["../log", "../../sites/b/key", "a/../a", "/etc/passwd", "."])
def test_a_name_of_a_site_is_no_path(name, folder, fedme):
    other = folder / "server" / "log.json"
    other.write_text("{}")
    code, _, err = fedme("deploy", "remove", folder, name)
    assert (code, f"no site is called '{name}'" in " ".join(err.split())) == (2, True)
    assert other.exists()
    assert Federation.read(folder).keys().keys() == {"a", "b"}


@pytest.mark.parametrize("name", ["\x1b[2J\u202eevil\nall is well", "x" * 10**6])
def test_text_of_the_server_is_data_in_the_log_of_a_site(name, folder, caplog):
    own = site(folder)
    request = MessageContent.of(run="r", config={**own.experiment.plain(), name: 1})
    with pytest.raises(site_app.SiteError) as refused:
        site_app.handshake(request, {"site": str(own.folder / "site.toml")})
    assert "the server's experiment differs from the one this site agreed to" in str(refused.value)
    assert "the server's experiment differs" in caplog.text
    for text in (str(refused.value), caplog.messages[-1], (own.records / "audit.jsonl").read_text()):
        assert not {"\x1b", "\u202e"} & set(text)
        assert "\nall is well" not in text
        assert len(text) < 20_000


def test_a_torn_line_does_not_count_and_damage_is_named(tmp_path):
    path = tmp_path / "deep" / "lines.jsonl"
    for i in range(3):
        append_only.append(path, {"i": i, "text": "ä\n"})
    whole = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in range(1, last + 1):  # every way in which the last write can be incomplete
        path.write_bytes(whole[:-cut])
        assert [line["i"] for line in append_only.lines(path)] == [0, 1]
        append_only.append(path, {"i": 7})
        assert [line["i"] for line in append_only.lines(path)] == [0, 1, 7]
    path.write_bytes(whole.replace(b'"i": 1', b'"i" 1'))
    with pytest.raises(RunError, match="line 2 is damaged"):
        append_only.lines(path)


def test_everything_that_leaves_is_a_line(folder, fedme):
    own_site, ask = private(folder)
    greet(own_site, "first")
    ask("first")
    shutil.rmtree(own_site.state)
    with pytest.raises(site_app.SiteError):
        ask("first", 7)
    transfers = json.loads(fedme("deploy", "audit", own_site.folder, "--json")[1])
    sent = [line for line in transfers if line["what"] == "sent"]
    assert [sorted(line["with"])[:1] for line in sent] == [["arch"], ["losses"], ["error"]]
    assert sent[0]["with"]["samples"] == 24
    assert "agreed to 2 rounds" in sent[2]["with"]["error"]


@pytest.mark.parametrize(("t", "total"), [(10**9, 10**9 + 1), (2, 2), (0, 3), (-1, 2), (1, 1)])
def test_a_site_is_asked_only_for_rounds_that_it_agreed_to(folder, t, total):
    own_site, ask = private(folder)
    with pytest.raises(site_app.SiteError, match=f"agreed to 2 rounds, counted from 0, but is asked for {t} of {total}"):
        ask("r", t, total)
    assert not PrivacyAccount.of(own_site).lines()
    assert not own_site.state.exists()


def test_a_site_is_asked_only_for_fine_tuning_that_it_agreed_to(folder):
    own_site, ask = private(folder, finetune={"epochs": 2}, privacy={"noise_multiplier": 1.0})
    ask()
    task, _ = own_site.task()
    agreed_to = Finetune(own_site.experiment.settings.train, 2)

    def evaluate(finetune):
        content = MessageContent.of(
            run="r", when=Round(0, 2), delivery=SharedModel(Model.init(task.shared, Key(0))), finetune=finetune
        )
        return site_app.evaluate(content, {"site": str(own_site.folder / "site.toml")})

    assert evaluate(agreed_to).read("spent", Ledger)
    evaluate(None)
    with pytest.raises(site_app.SiteError, match="finetune: the site did not agree to this fine-tuning"):
        evaluate(replace(agreed_to, epochs=3))


def test_a_site_keeps_the_model_of_its_best_round(folder):
    """It is a candidate at the end, and it is kept on the site's own disk between rounds."""
    rounds = 6
    own_site, _ = private(folder, rounds=rounds, privacy={"noise_multiplier": 1.0})
    task, _ = own_site.task()
    validated = []
    for t in range(rounds):
        delivery = SharedModel(Model.init(task.shared, Key(rounds - t)))
        content = MessageContent.of(run="r", when=Round(t, rounds), delivery=delivery, finetune=None)
        reply = site_app.evaluate(content, {"site": str(own_site.folder / "site.toml")})
        scores = {(score.model, score.split): score.metrics.accuracy for score in reply.read("scores", list[ModelScore])}
        validated.append(scores["personal", "val"])
    best = max(range(rounds), key=lambda t: (validated[t], t))
    assert best != rounds - 1
    kept = outputs.read(folder_of(own_site.state / "runs" / "r", "a"))
    right = (kept["val/best"].argmax(1) == kept["val/targets"]).double().mean().item()
    assert right == pytest.approx(validated[best])
    choice = model_choice.read(folder_of(own_site.state / "runs" / "r", "a"))
    assert "best" in choice.candidates


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
