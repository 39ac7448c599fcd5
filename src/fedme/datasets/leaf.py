"""The JSON files of LEAF: a list of users, how many samples each has, and the samples of each.

Files may have any name and there may be any number of them; they are looked for where LEAF's scripts leave them. Users who
are in `user_data` but not in `users` are passed over: LEAF leaves such entries behind for users it has dropped.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedme.datasets.data_errors import DataError


@dataclass(frozen=True)
class User:
    """One user's entry, with the place to name when something is wrong with it."""

    name: str
    declared: int
    data: dict[str, Any]
    where: str

    def column(self, key: str) -> list[Any]:
        """A list that must be there and must have as many entries as the file declares."""
        values = self.data.get(key)
        if not isinstance(values, list):
            raise DataError(f"{self.where}: has no list '{key}'; make the file again with LEAF's scripts")
        if len(values) != self.declared:
            raise DataError(
                f"{self.where}: '{key}' has {len(values)} entries but num_samples says {self.declared}; "
                "the file is damaged or was edited, make it again with LEAF's scripts"
            )
        return values


def find_files(name: str, folder: Path, recipe: str) -> tuple[list[Path], list[Path]]:
    """The JSON files for training and for testing (none, if the data is not divided yet)."""
    for base in (folder, folder / "data"):
        train, test = sorted((base / "train").glob("*.json")), sorted((base / "test").glob("*.json"))
        if train and test:
            return train, test
        if train or test:
            there, lacking = ("train", "test") if train else ("test", "train")
            raise DataError(f"{name}: {base / there} has JSON files but {base / lacking} has none; both are needed")
    for base in (folder / "data" / "all_data", folder / "all_data", folder):
        if undivided := sorted(base.glob("*.json")):
            return undivided, []
    raise DataError(
        f"{name}: no JSON files in {folder}/train and {folder}/test, nor in {folder}. This data set has no direct download: "
        f"{recipe}, and copy what it leaves in data/train and data/test to these folders "
        f"(or set FEDME_DATA to the folder that holds {folder.name}/)"
    )


def read_users(files: list[Path]) -> Iterator[User]:
    """The users of all files, in order."""
    seen: dict[str, Path] = {}
    for path in files:
        for user in _read(path):
            if user.name in seen:
                raise DataError(f"{user.where}: is also in {seen[user.name]}; a user must be in one file only")
            seen[user.name] = path
            yield user


def _read(path: Path) -> Iterator[User]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not readable JSON ({error}); make it again with LEAF's scripts") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: is not a JSON object with users, num_samples and user_data")
    kinds: tuple[tuple[str, type], ...] = (("users", list), ("num_samples", list), ("user_data", dict))
    for key, kind in kinds:
        if not isinstance(content.get(key), kind):
            raise DataError(f"{path}: '{key}' is missing or not a {kind.__name__}; is this a file of LEAF?")
    users, sizes = content["users"], content["num_samples"]
    if len(users) != len(sizes):
        raise DataError(f"{path}: has {len(users)} users but {len(sizes)} entries in num_samples")
    for name, size in zip(users, sizes, strict=True):
        where = f"{path}, user {name!r}"
        if not isinstance(name, str) or not name:
            raise DataError(f"{where}: a user's name must be a text that is not empty")
        if type(size) is not int or size < 0:
            raise DataError(f"{where}: num_samples is {size!r}, not a count")
        if not isinstance(entry := content["user_data"].get(name), dict):
            raise DataError(f"{where}: has no entry in user_data")
        yield User(name, size, entry, where)
