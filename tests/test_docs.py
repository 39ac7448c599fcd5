"""Every block of the documentation is executed as it stands: files are written, commands are run."""

import glob
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fedme
from fedme import cli
from fedme.execution.compiled import library
from fedme_test_support import needs_compiled_code

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"^```(\w*)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
# Pages that only the site has; tests/test_site.py follows links to them.
GENERATED = re.compile(r"(\.\./)*(reference/\w+|methods/index|tour|cite|changelog|contributing|security)\.md")


PICTURE = re.compile(r"\]\(pictures/gallery/(\S+)\)")  # made by the blocks of the page that shows them


def blocks(page):
    return [match.groups() for match in BLOCK.finditer(page.read_text())]


def expanded(words):
    """Words with a star as a shell expands them."""
    return [name for word in words for name in ((sorted(glob.glob(word)) if "*" in word else []) or [word])]


OPTIONAL = (
    "transformers",
    "flwr_datasets",
    "matplotlib",
)  # of development: without them their examples are skipped, the rest is run
# Real processes: tests/deployment/test_tutorial.py and tests/running/test_ray_run.py run them.
ELSEWHERE = ("deploy.md", "cluster.md")
HERE = [page for page in PAGES if page.name not in ELSEWHERE]


# Why examples are not trained in compiled code, as the engine says it. Every other one is.
NOT_COMPILED = (
    "the inputs are augmented or not one tensor",
    "private training",
    "unsupported loss ClassWeighted",
    "unsupported loss Imitate",
    "unsupported loss TowardsClass",  # FD, FedProto and HeteroFL have losses of their own
    "unsupported loss TowardsPrototype",
    "unsupported loss MaskedCrossEntropy",
    "unsupported optimizer Mixing",  # APFL
)


def trained_elsewhere(folder):
    """What the engine says about trainings outside of compiled code, in all runs below a folder."""
    lines = [line for log in folder.rglob("engine.log") for line in log.read_text().splitlines()]
    return [line for line in lines if line.startswith("train: ") and not line.endswith("operations compiled")]


@pytest.mark.parametrize("page", HERE, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    lacking = []
    for kind, title, text in blocks(page):
        if kind in ("python", "toml"):
            assert title, f"{page.name}: a block of {kind} without a title"
            (tmp_path / title).write_text(text)
            if kind == "python":
                # A reader's file of such a name would be imported in the place of Python's own.
                assert Path(title).stem not in sys.stdlib_module_names, f"{page.name}: {title}"
                sys.modules.pop(Path(title).stem, None)
                try:
                    runpy.run_path(title)
                except ModuleNotFoundError as error:
                    if error.name not in OPTIONAL:
                        raise
                    lacking.append(error.name)
        elif kind == "sh":
            for line in text.splitlines():
                words = expanded(shlex.split(line, comments=True))
                assert words[0] == "fedme", line
                monkeypatch.setattr(sys, "argv", words)
                with pytest.raises(SystemExit) as end:
                    cli.main()
                said = capsys.readouterr()
                if package := re.search(r"error: log: '(\w+)' is not installed", said.err):
                    lacking.append(package[1])
                    break
                assert end.value.code in (0, None), f"{line}\n{said.out}{said.err}"
        else:
            assert kind == "", f"{page.name}: nobody runs a block of {kind}"
    if not isinstance(library(), str):
        slow = [line for line in trained_elsewhere(tmp_path) if not any(reason in line for reason in NOT_COMPILED)]
        assert not slow, f"{page.name}: examples should be fast: {slow}"
    for _, title, _ in blocks(page):
        sys.modules.pop(Path(title or "").stem, None)
    missing = [name for name in PICTURE.findall(page.read_text()) if not (tmp_path / name).exists()]
    assert lacking or not missing, f"{page.name}: no block makes {missing}"
    if lacking:
        pytest.skip(f"needs {', '.join(dict.fromkeys(lacking))} (pip install -c constraints.txt -e '.[dev-full]')")


class Arctangent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        return torch.atan(self.layer(x))


@needs_compiled_code
@pytest.mark.parametrize(("network", "lines"), [(lambda: nn.Linear(6, 2), 0), (Arctangent, 1)], ids=["compiled", "arctangent"])
def test_an_example_that_is_not_compiled_is_noticed(network, lines, tmp_path):
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    clients = [fedme.Client(name, train=(x, (x[:, 0] > 0).long()), model=network()) for name in ("a", "b")]
    fedme.FedAvg(rounds=1).fit(clients, output=tmp_path / "run", quiet=True)
    assert len(trained_elsewhere(tmp_path)) == lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists() or GENERATED.fullmatch(target), f"{page.name}: {target}"


def test_a_file_has_the_same_content_on_every_page():
    contents = {}
    for page in PAGES:
        for _, title, text in blocks(page):
            if title:
                assert contents.setdefault(title, text) == text, f"{page.name}: {title}"


def test_some_commands_are_documented():
    commands = [line for page in PAGES for kind, _, text in blocks(page) if kind == "sh" for line in text.splitlines()]
    assert len(commands) > 10
