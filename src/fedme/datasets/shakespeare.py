"""Shakespeare: predict the next character of a role's lines, from LEAF's JSON files; every role is a natural client.

Two forms are read. In LEAF's finished form (x, y) a sample is a text and the character that follows it. In its raw form a
role's whole text is given and every place in it is a sample: the windows are cut when a batch is gathered, so the text is
held once. Samples are in the order of the text and neighbours share almost all of their characters: a random cut would put
nearly every test window into the training part as well. `Dataset.overlap` therefore asks for cuts in time order with a gap.

Vocabulary: the table of TensorFlow Federated's text tutorials, 86 characters with the padding symbol before them (0) and the
beginning, the end and "any other character" after them: 90 symbols, for inputs and for predictions.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fedme.core.data import ClientId, Schema
from fedme.datasets.data_errors import DataError
from fedme.datasets.dataset import Dataset
from fedme.datasets.leaf import User, find_files, read_users
from fedme.datasets.text_windows import Windows

CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"  # order is the code
VOCABULARY = ("<pad>", *CHARACTERS, "<bos>", "<eos>", "<oov>")
OTHER = len(VOCABULARY) - 1
LEAF_LENGTH = 80  # the window that LEAF's sample counts assume
RECIPE = (
    "make it with LEAF (github.com/TalwalkarLab/leaf), in data/shakespeare: "
    "./preprocess.sh -s niid --sf 0.2 -k 0 -t sample --tf 0.8"
)

_SYMBOLS = np.full(128, OTHER, dtype=np.uint8)
_SYMBOLS[[ord(character) for character in CHARACTERS]] = np.arange(1, len(CHARACTERS) + 1)


def encode(text: str) -> np.ndarray:
    """The symbols of a text, one byte each."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return np.where(points < 128, _SYMBOLS[np.minimum(points, 127)], np.uint8(OTHER))


@dataclass(frozen=True)
class Shakespeare:
    """Lines of Shakespeare by role (LEAF): predict the character after 80 others, 90 symbols; every role is a client."""

    length: int = LEAF_LENGTH  # characters before the one to be predicted

    def __post_init__(self) -> None:
        if self.length < 1:
            raise DataError(f"shakespeare: length = {self.length}; a window has at least one character")

    def load(self, root: Path) -> Dataset:
        """Read the JSON files of `root`/shakespeare."""
        files = find_files("shakespeare", root / "shakespeare", RECIPE)
        collected = _Collected(self.length)
        rows: tuple[dict[ClientId, torch.Tensor], dict[ClientId, torch.Tensor]] = ({}, {})
        sizes = []
        for part, owned in zip(files, rows, strict=True):
            for user in read_users(part):
                owned[user.name] = collected.add(user)
            sizes.append(collected.samples)
        if not sizes[0]:
            raise DataError(f"shakespeare: the files in {files[0][0].parent} hold no window of {self.length} characters")
        train, test = rows
        none = torch.empty(0, dtype=torch.int64)
        everything = torch.arange(collected.samples)
        return Dataset(
            name="shakespeare",
            source=collected.windows(),
            schema=Schema((self.length,), VOCABULARY, {"characters": CHARACTERS}, vocabulary=len(VOCABULARY)),
            train=everything[: sizes[0]],
            test=everything[sizes[0] :],
            owners={name: (train.get(name, none), test.get(name, none)) for name in {**train, **test}},
            overlap=self.length,
        )


@dataclass
class _Collected:
    """The texts read so far, one after another, and where the samples begin in them."""

    length: int
    texts: list[np.ndarray] = field(default_factory=list)
    starts: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    symbols: int = 0
    samples: int = 0

    def add(self, user: User) -> torch.Tensor:
        text, starts, labels = self._raw(user) if "raw" in user.data else self._finished(user)
        self.texts.append(text)
        self.starts.append(starts + self.symbols)
        self.labels.append(labels)
        self.symbols += len(text)
        self.samples += len(labels)
        return torch.arange(self.samples - len(labels), self.samples)

    def _raw(self, user: User) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not isinstance(raw := user.data["raw"], str):
            raise DataError(f"{user.where}: 'raw' is not a text")
        # Some versions of LEAF count characters, others count the windows of 80 that fit.
        if user.declared not in (len(raw), max(0, len(raw) - LEAF_LENGTH)):
            raise DataError(
                f"{user.where}: 'raw' has {len(raw)} characters, which does not agree with num_samples = {user.declared}; "
                "the file is damaged or was edited, make it again with LEAF's scripts"
            )
        text = encode(raw)
        return text, np.arange(max(0, len(text) - self.length)), text[self.length :]

    def _finished(self, user: User) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs, targets = user.column("x"), user.column("y")
        for text in inputs:
            if not isinstance(text, str) or len(text) != self.length:
                raise DataError(f"{user.where}: an entry of 'x' is not a text of {self.length} characters")
        for character in targets:
            if not isinstance(character, str) or len(character) != 1:
                raise DataError(f"{user.where}: the entry {character!r} of 'y' is not a single character")
        return encode("".join(inputs)), np.arange(len(inputs)) * self.length, encode("".join(targets))

    def windows(self) -> Windows:
        return Windows(
            text=torch.from_numpy(np.concatenate(self.texts)),
            starts=torch.from_numpy(np.concatenate(self.starts).astype(np.int64)),
            labels=torch.from_numpy(np.concatenate(self.labels).astype(np.int64)),
            length=self.length,
        )
