"""The JSON files of LEAF: a list of users, the number of samples per user, and the samples of every user.

Files are searched where LEAF's scripts write them; their names do not matter. Entries of `user_data` whose user is not in
`users` are ignored: LEAF leaves such entries behind for users it has dropped.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedme.core.data import ClientId
from fedme.datasets.data_errors import DataError
from fedme.datasets.dataset import ClientRows

AGAIN = "create the file again with LEAF's scripts"


@dataclass(frozen=True)
class User:
    """The entry of one user; `where` names file and user in error messages."""

    name: str
    declared: int
    data: dict[str, Any]
    where: str

    def column(self, key: str) -> list[Any]:
        """A required list with as many entries as the file declares."""
        values = self.data.get(key)
        if not isinstance(values, list):
            raise DataError(f"{self.where}: the list '{key}' is missing; {AGAIN}")
        if len(values) != self.declared:
            raise DataError(
                f"{self.where}: '{key}' must have num_samples = {self.declared} entries, got {len(values)}; {AGAIN}"
            )
        return values


def find_files(name: str, folder: Path, recipe: str) -> tuple[list[Path], list[Path]]:
    """The JSON files of the training set and of the test set; the latter is empty if the data is not split yet."""
    for base in (folder, folder / "data"):
        train, test = sorted((base / "train").glob("*.json")), sorted((base / "test").glob("*.json"))
        if train and test:
            return train, test
        if train or test:
            present, missing = ("train", "test") if train else ("test", "train")
            raise DataError(f"{name}: {base / present} has JSON files but {base / missing} has none; both are needed")
    for base in (folder / "data" / "all_data", folder / "all_data", folder):
        if unsplit := sorted(base.glob("*.json")):
            return unsplit, []
    raise DataError(
        f"{name}: no JSON files in {folder}/train and {folder}/test, nor in {folder}. This data set has no direct download: "
        f"{recipe}, and copy the files of data/train and data/test to these folders "
        f"(or set FEDME_DATA to the folder that contains {folder.name}/)"
    )


def read_rows(files: tuple[list[Path], list[Path]], add: Callable[[User], int]) -> tuple[Tensor, Tensor, ClientRows]:
    """Pass all users to `add`, which returns their number of samples; the training rows, the test rows and their owners."""
    rows: tuple[dict[ClientId, Tensor], dict[ClientId, Tensor]] = ({}, {})
    ends = [0]
    for part, rows_of in zip(files, rows, strict=True):
        count = ends[-1]
        for user in read_users(part):
            rows_of[user.name] = torch.arange(count, count := count + add(user))
        ends.append(count)
    train, test = rows
    everything, none = torch.arange(ends[-1]), torch.empty(0, dtype=torch.int64)
    owners = {name: (train.get(name, none), test.get(name, none)) for name in {**train, **test}}
    return everything[: ends[1]], everything[ends[1] :], owners


def read_users(files: list[Path]) -> Iterator[User]:
    """The users of all files, in order."""
    paths: dict[str, Path] = {}
    for path in files:
        for user in _read(path):
            if user.name in paths:
                raise DataError(f"{user.where}: also in {paths[user.name]}; a user must be in one file only")
            paths[user.name] = path
            yield user


def _read(path: Path) -> Iterator[User]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); {AGAIN}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object with users, num_samples and user_data; {AGAIN}")
    required: tuple[tuple[str, type], ...] = (("users", list), ("num_samples", list), ("user_data", dict))
    for key, type_ in required:
        if not isinstance(content.get(key), type_):
            raise DataError(f"{path}: '{key}' is missing or not a {type_.__name__}; {AGAIN}")
    users, sizes = content["users"], content["num_samples"]
    if len(users) != len(sizes):
        raise DataError(f"{path}: {len(users)} users, but {len(sizes)} entries in num_samples; {AGAIN}")
    for name, size in zip(users, sizes, strict=True):
        where = f"{path}, user {name!r}"
        if not isinstance(name, str) or not name:
            raise DataError(f"{where}: the name of a user must be a non-empty string")
        if type(size) is not int or size < 0:
            raise DataError(f"{where}: num_samples must be an integer >= 0, got {size!r}")
        if not isinstance(entry := content["user_data"].get(name), dict):
            raise DataError(f"{where}: no entry in user_data")
        yield User(name, size, entry, where)
