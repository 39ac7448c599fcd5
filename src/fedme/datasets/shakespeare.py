"""Shakespeare: next-character prediction on the lines of a role, from the JSON files of LEAF; every role is a natural client.

Two formats are supported. In the preprocessed format of LEAF (x, y) a sample is a text and the next character. In its raw
format every position in the text of a role is a sample: windows are cut when a batch is gathered, so the text is stored
once. Neighbouring samples share almost all characters, so a random split would put nearly every test window into the
training set as well. `Dataset.overlap` therefore requests splits in time order with a gap.

Vocabulary: that of TensorFlow Federated's text tutorials, 86 characters with the padding symbol before them (0) and the
symbols for beginning, end and out-of-vocabulary after them: 90 symbols, for inputs and for predictions.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fedme.core.data import Schema, Windows
from fedme.core.settings import setting
from fedme.datasets.data_errors import DataError, require
from fedme.datasets.dataset import Dataset
from fedme.datasets.leaf import AGAIN, User, find_files, read_rows

CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"  # order is the code
VOCABULARY = ("<pad>", *CHARACTERS, "<bos>", "<eos>", "<oov>")
OUT_OF_VOCABULARY = len(VOCABULARY) - 1
LEAF_LENGTH = 80  # the window length that LEAF's sample counts assume
RECIPE = (
    "create it with LEAF (github.com/TalwalkarLab/leaf), in data/shakespeare: "
    "./preprocess.sh -s niid --sf 0.2 -k 0 -t sample --tf 0.8"
)

_SYMBOLS = np.full(128, OUT_OF_VOCABULARY, dtype=np.uint8)
_SYMBOLS[[ord(character) for character in CHARACTERS]] = np.arange(1, len(CHARACTERS) + 1)


def encode(text: str) -> np.ndarray:
    """The symbols of a text, one byte each."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return np.where(points < 128, _SYMBOLS[np.minimum(points, 127)], np.uint8(OUT_OF_VOCABULARY))


@dataclass(frozen=True)
class Shakespeare:
    """Lines of Shakespeare by role (LEAF): predict the next of 90 characters after 80 others; every role is a client."""

    length: int = setting(LEAF_LENGTH, "characters of an input, before the one to predict")

    def __post_init__(self) -> None:
        require(self.length >= 1, "length", f"must be >= 1, got {self.length}")

    def load(self, root: Path) -> Dataset:
        """Read the JSON files of `root`/shakespeare."""
        files = find_files("shakespeare", root / "shakespeare", RECIPE)
        builder = _WindowsBuilder(self.length)
        train, test, owners = read_rows(files, builder.add)
        if not len(train):
            raise DataError(f"shakespeare: the files in {files[0][0].parent} contain no window of {self.length} characters")
        return Dataset(
            name="shakespeare",
            source=builder.windows(),
            schema=Schema((self.length,), VOCABULARY, {"characters": CHARACTERS}, vocabulary=len(VOCABULARY)),
            train=train,
            test=test,
            owners=owners,
            overlap=self.length,
        )


@dataclass
class _WindowsBuilder:
    """Concatenates the texts of all users and records where the samples begin."""

    length: int
    texts: list[np.ndarray] = field(default_factory=list)
    starts: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    symbols: int = 0

    def add(self, user: User) -> int:
        text, starts, labels = self._raw(user) if "raw" in user.data else self._preprocessed(user)
        self.texts.append(text)
        self.starts.append(starts + self.symbols)
        self.labels.append(labels)
        self.symbols += len(text)
        return len(labels)

    def _raw(self, user: User) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not isinstance(raw := user.data["raw"], str):
            raise DataError(f"{user.where}: 'raw' must be a string; {AGAIN}")
        # Some versions of LEAF count characters, others windows of 80 characters.
        if user.declared not in (len(raw), max(0, len(raw) - LEAF_LENGTH)):
            raise DataError(
                f"{user.where}: 'raw' has {len(raw)} characters, which contradicts num_samples = {user.declared}; {AGAIN}"
            )
        text = encode(raw)
        return text, np.arange(max(0, len(text) - self.length)), text[self.length :]

    def _preprocessed(self, user: User) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs, targets = user.column("x"), user.column("y")
        for text in inputs:
            if not isinstance(text, str) or len(text) != self.length:
                raise DataError(f"{user.where}: entries of 'x' must be strings of {self.length} characters")
        for character in targets:
            if not isinstance(character, str) or len(character) != 1:
                raise DataError(f"{user.where}: entries of 'y' must be single characters, got {character!r}")
        return encode("".join(inputs)), np.arange(len(inputs)) * self.length, encode("".join(targets))

    def windows(self) -> Windows:
        return Windows(
            text=torch.from_numpy(np.concatenate(self.texts)),
            starts=torch.from_numpy(np.concatenate(self.starts).astype(np.int64)),
            labels=torch.from_numpy(np.concatenate(self.labels).astype(np.int64)),
            length=self.length,
        )
