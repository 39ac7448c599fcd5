"""Imports go one way, methods are known by nobody else, and nothing that is read can run a program."""

import ast
from pathlib import Path

import pytest

import fedme
from fedme.methods import BUILT_IN

ROOT = Path(fedme.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

# What each room may use, besides itself: everything before it in this order, but `datasets` and `networks` only `core`.
ORDER = [
    "core",
    "datasets",
    "networks",
    "learning",
    "methods",
    "execution",
    "federation",
    "config",
    "results",
    "artifacts",
    "running",
    "auditing",
    "report",
    "reproduction",
    "deployment",
    "api",
    "cli",
    "__init__",
    "__main__",
]
ALLOWED = {room: {*ORDER[:rank], "(version)"} for rank, room in enumerate(ORDER)}
ALLOWED |= {"core": set(), "datasets": {"core"}, "networks": {"core"}, "learning": {"core"}, "methods": {"core", "learning"}}
ALLOWED |= {"execution": {"core", "learning"}, "federation": {"core", "learning", "execution"}}


def part(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def modules(tree: ast.AST, path: Path) -> list[str]:
    """The full names of everything a file imports, wherever in the file."""
    package = ["fedme", *path.relative_to(ROOT).parent.parts]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{whole}.{alias.name}" for alias in node.names] if whole == "fedme" else [whole]
    return found


def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def called(tree: ast.AST) -> list[str]:
    """The dotted names of everything that is called or referred to."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            names.append(ast.unparse(node))
    return names


def test_every_part_of_the_package_is_known():
    assert {part(path) for path in FILES} == ALLOWED.keys()
    assert len(FILES) > 40


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_go_one_way(path):
    mine = part(path)
    for name in modules(parsed(path), path):
        if name.split(".")[0] != "fedme":
            continue
        pieces = name.split(".")
        other = pieces[1] if len(pieces) > 1 and pieces[1] != "__version__" else "(version)"
        assert other == mine or other in ALLOWED[mine], f"{mine} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_flower_is_imported_in_one_place(path):
    inside = path.relative_to(ROOT).parts[:2] == ("federation", "flower")
    inside = inside or str(path.relative_to(ROOT)) in FLOWER_INTERNALS  # the site's programs
    assert inside or "flwr" not in {name.split(".")[0] for name in modules(parsed(path), path)}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_ray_is_imported_in_one_place(path):
    inside = path.relative_to(ROOT).parts[:2] == ("execution", "ray")
    inside = inside or str(path.relative_to(ROOT)) == "running/ray_jobs.py"  # whole runs as tasks
    assert inside or "ray" not in {name.split(".")[0] for name in modules(parsed(path), path)}


PUBLIC_FLOWER = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
FLOWER_INTERNALS = {
    "federation/flower/internals.py",
    "deployment/flower_site_internals.py",
}  # each names the version it was read from and has its own test


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_flowers_insides_are_reached_from_one_file(path):
    imported = {name for name in modules(parsed(path), path) if name.split(".")[0] == "flwr"}
    assert str(path.relative_to(ROOT)) in FLOWER_INTERNALS or imported <= PUBLIC_FLOWER


FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
FORBIDDEN_NAMES = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "np.load",
    "numpy.load",
    "pd.read_pickle",
}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_nothing_is_unpickled_or_evaluated(path):
    tree = parsed(path)
    assert not {name.split(".")[0] for name in modules(tree, path)} & FORBIDDEN_MODULES
    reads_npz = str(path.relative_to(ROOT)) == "datasets/data_files.py"
    assert not set(called(tree)) & (FORBIDDEN_NAMES - {"np.load"} if reads_npz else FORBIDDEN_NAMES)
    keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    dangerous = [node for node in keywords if node.arg in ("allow_pickle", "weights_only")]
    assert [ast.unparse(node) for node in dangerous] == (["allow_pickle=False"] if reads_npz else [])


# Who may import by a name, and where the name comes from: never from data, a checkpoint, a saved model or a message.
IMPORTING = {
    "deployment/flower_site_internals.py": "the modules of Flower that it names itself",
    "__init__.py": "a table in the file",
    "api/display.py": "constants: packages that are optional",
    "api/result.py": "a constant",
    "cli/__init__.py": "a list in the file",
    "cli/deploy_commands.py": "a constant",
    "datasets/data_files.py": "constants: packages that are optional",
    "execution/ray/__init__.py": "constants: modules of fedme that need Ray or Flower",
    "federation/flower/__init__.py": "constants: modules of fedme that need Flower",
    "config/experiment.py": "local configuration: functions and methods of one's own",
    "config/identity.py": "local configuration: the modules whose source a run depends on",
    "results/loggers.py": "a table in the file",
    "reproduction/figures.py": "a constant",
    "running/flower_run.py": "a constant",
    "running/ray_jobs.py": "a constant: a package that is optional",
    "running/ray_run.py": "constants",
    "networks/lookup.py": "local configuration: networks of one's own, and only where the caller says `imports`",
}
IMPORTERS = {"import_module", "find_spec", "spec_from_file_location", "exec_module", "load_module", "reload", "locate"}


def test_importing_by_name_is_done_in_few_places():
    found = set()
    for path, name in zip(FILES, NAMES, strict=True):
        tree = parsed(path)
        named = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute | ast.Name)
        }
        assert not {module.split(".")[0] for module in modules(tree, path)} & {"imp", "runpy", "pydoc", "code", "codeop"}, name
        if named & IMPORTERS:
            found.add(name)
    assert found == IMPORTING.keys()


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_literals_are_read_in_one_place_and_processes_exchange_bytes(path):
    names = called(parsed(path))
    assert "ast.literal_eval" not in names or str(path.relative_to(ROOT)) == "networks/lookup.py"
    if str(path.relative_to(ROOT)) == "execution/worker_processes.py":  # a process and those it forked itself
        names = [name for name in names if not name.endswith("line.recv")]
    assert not [name for name in names if name.endswith((".recv", ".read_array", ".load_library", ".jit.load", ".unsafe_load"))]


GLOBAL_SEEDS = {
    "torch.manual_seed",
    "torch.seed",
    "np.random.seed",
    "numpy.random.seed",
    "random.seed",
    "torch.cuda.manual_seed",
}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_global_source_of_randomness(path):
    tree = parsed(path)
    used = set(called(tree))
    if str(path.relative_to(ROOT)) == "core/global_generators.py":  # for networks of users: saved, seeded and restored
        own = {name for name in used if name.startswith(("random.", "np.random."))}
        assert own == {
            *("random.getstate", "random.seed", "random.setstate"),
            *("np.random.get_state", "np.random.seed", "np.random.set_state"),
        }
        return
    assert not used & GLOBAL_SEEDS
    assert "random" not in modules(tree, path)
    drawn = {name.removeprefix("np.random.") for name in used if name.startswith("np.random.")}
    assert drawn <= {"Generator", "default_rng", "RandomState"}  # sources of one's own
    seeding = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "manual_seed"]
    for node in seeding:  # a generator of one's own, or the global one between saving and restoring it
        owner = ast.unparse(node.value)
        assert owner == "torch.Generator()" or (
            owner == "torch.default_generator" and str(path.relative_to(ROOT)) == "core/model.py"
        )
    draws = (
        "torch.rand",
        "torch.randn",
        "torch.randint",
        "torch.randperm",
        "torch.normal",
        "torch.bernoulli",
        "torch.multinomial",
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in draws:
            assert any(keyword.arg == "generator" for keyword in node.keywords), ast.unparse(node)


METHOD_NAMES = {method.__name__ for method in BUILT_IN}


@pytest.mark.parametrize("path", [p for p in FILES if part(p) != "methods"], ids=lambda p: str(p.relative_to(ROOT)))
def test_no_method_is_known_outside_its_file(path):
    """Methods describe themselves: nobody imports a method class, and nobody compares a method's name."""
    tree = parsed(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedme.methods"):
            assert not {alias.name for alias in node.names} & METHOD_NAMES, f"{path} imports a method"
        if isinstance(node, ast.Compare):
            texts = {ast.unparse(side) for side in (node.left, *node.comparators)}
            named = [text for text in texts if text.endswith(("method_name", "method.name()", '["method"]', "['method']"))]
            assert not named, f"{path}:{node.lineno} compares a method's name"
