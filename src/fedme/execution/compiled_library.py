"""The compiled code that this processor runs: with vectors of AVX-512 where they pay, otherwise with those of AVX2."""

import ctypes
import functools
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

INTERFACE = 14  # of the functions of the C++ code and the structures that they get; change both together
NARROW = "FEDME_AVX2"  # an environment variable: 1 leaves AVX-512 out


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | str:
    """The compiled code, or why there is none."""
    code = loaded("_compiled")
    if isinstance(code, str):
        return code
    if not code.fedme_runs_here():
        return "this processor lacks AVX2"
    if code.fedme_avx512_pays() and os.environ.get(NARROW) != "1":
        wide = loaded("_compiled_avx512")
        return code if isinstance(wide, str) else wide
    return code


def loaded(name: str) -> ctypes.CDLL | str:
    """An extension, or why it is not there."""
    candidates = [Path(__file__).with_name(f"{name}{suffix}") for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in candidates if path.exists()), None)
    if path is None:
        return "the extension was not built when fedme was installed (no C++ compiler?)"
    try:
        code = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the extension cannot be loaded: {error}"
    if not hasattr(code, "fedme_interface") or code.fedme_interface() != INTERFACE:
        return "the extension was built from other sources; install fedme again"
    return code


def active(code: ctypes.CDLL | str) -> str:
    """Which compiled code is active, or why none is."""
    return f"no compiled code: {code}" if isinstance(code, str) else f"compiled code: {Path(code._name).name}"


@functools.lru_cache(maxsize=1)
def vector_bytes() -> int:
    """The size of its vectors, on which the layout of values in memory depends."""
    code = library()
    return 32 if isinstance(code, str) else int(code.fedme_vector_bytes())
