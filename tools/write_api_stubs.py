"""Write src/fedme/api/methods.pyi, the typed signatures of the learners, from the dataclasses of the methods and the settings.

python tools/write_api_stubs.py
"""

import inspect
import re
import typing
from pathlib import Path
from typing import Any

from fedme.api import methods
from fedme.api.learner import EXPERIMENT, Learner
from fedme.config.settings import Settings
from fedme.methods import BUILT_IN

STUB = Path(inspect.getfile(methods)).with_suffix(".pyi")
HEAD = """# Written by tools/write_api_stubs.py from the dataclasses of the methods; do not edit.
import collections.abc
import typing

import fedme.methods.fedme.adoption
from fedme.api.learner import Learner

class ExperimentSettings(typing.TypedDict, total=False):
    # Tables may be given as dictionaries: train={"lr": 0.05}.
"""


def stub() -> str:
    """The text of the stub file."""
    hints = typing.get_type_hints(Settings)
    text = HEAD
    for name in EXPERIMENT:
        text += f"    {name}: {_shown(hints[name])}\n"
    for method in BUILT_IN:
        learner = getattr(methods, method.__name__)
        hints = typing.get_type_hints(method)
        own = [p for p in inspect.signature(learner).parameters.values() if p.name not in EXPERIMENT]
        text += f'\nclass {method.__name__}(Learner):\n    """{(method.__doc__ or "").splitlines()[0]}"""\n\n'
        text += "    def __init__(\n        self,\n"
        text += "        *,\n" if own else ""
        text += "".join(f"        {p.name}: {_shown(hints[p.name])} = ...,\n" for p in own)
        text += "        **experiment: typing.Unpack[ExperimentSettings],\n    ) -> None: ...\n"
    return text


def _shown(annotation: Any) -> str:
    """The annotation as source; a table of settings may also be a mapping, and defaults are elsewhere."""
    text = re.sub(r"(?<![.\w])(Union|Literal|Any)\b", r"typing.\1", inspect.formatannotation(annotation)).replace(
        "NoneType", "None"
    )
    return "collections.abc.Mapping[str, typing.Any]" if "fedme." in text and "adoption" not in text else text


if __name__ == "__main__":
    assert issubclass(methods.FedMe, Learner)
    STUB.write_text(stub(), encoding="utf-8")
