"""Damage for the fuzzer: bytes that flip, go missing or come twice; tables whose keys and values are not what they were."""

import json
import math
import random
import tomllib
from collections.abc import Callable
from typing import Any

import tomli_w

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        -(2**63),
        10**30,
        10**400,
        0.0,
        -0.5,
        1e308,
        5e-324,
        math.nan,
        math.inf,
        -math.inf,
    ),
    *(
        "",
        " ",
        "none",
        "nan",
        "0",
        "-1",
        "é\u0301",
        "\u202e",
        "\ud83d",
        "🦜" * 50,
        "a" * 5000,
        "../../etc",
        "/",
        "a\nb",
        "\x00",
        "[",
        "%s",
    ),
    *([], {}, [[]], [None], {"": {}}, {"name": "x"}, [1, "1", None, {}], ["mlr"] * 3),
)


def deep(levels: int = 2000) -> Any:
    """A list in a list in a list ..."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def of_bytes(data: bytes, draw: random.Random) -> bytes:
    """Other bytes."""
    way = draw.randrange(10)
    at = draw.randrange(len(data) + 1)
    to = min(len(data), at + draw.choice((1, 2, 4, 16, 256)))
    if way == 0:
        return data[:at]
    if way == 1:
        return b""
    if way == 2:
        return data[:at] + data[to:]
    if way == 3:
        return data[:to] + data[at:to] * draw.choice((1, 2, 50)) + data[to:]
    if way == 4:
        return data[:at] + draw.randbytes(draw.choice((1, 4, 64))) + data[to:]
    if way == 5:
        return data + draw.randbytes(draw.choice((1, 8, 1000)))
    if way == 6:
        return data[:at] + draw.choice((b"\x00", b"\xff", b"9", b"-", b'"', b"\n")) * (to - at) + data[to:]
    changed = bytearray(data)  # most often: a few bits
    for _ in range(draw.choice((1, 1, 2, 8)) if data else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a table of tables and lists; of a long list, its first and last entries."""
    found = [path] if path else []
    keys: list[Any] = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = list(range(min(3, len(value)))) + ([len(value) - 1] if len(value) > 3 else [])
    for key in keys:
        found += places(value[key], (*path, key))
    return found


def of_table(value: Any, draw: random.Random) -> Any:
    """Another table: one place of it missing, renamed, doubled, moved, or holding something odd. `value` is changed."""
    there = places(value)
    if not there:
        return draw.choice(ODD)
    *above, key = draw.choice(there)
    home = value
    for step in above:
        home = home[step]
    way = draw.randrange(8)
    if way == 0:
        del home[key]
    elif way == 1 and isinstance(home, dict):
        home[f"{key}{draw.choice(('', ' ', 'x', '.', 'é'))}x"] = home.pop(key)
    elif way == 2 and isinstance(home, list):
        home.extend([home[key]] * draw.choice((1, 1000)))
    elif way == 3 and len(there) > 1:
        other = value
        for step in draw.choice(there):
            other = other[step]
        home[key] = json.loads(json.dumps(other)) if not isinstance(other, float) else other
    elif way == 4:
        home[key] = deep()
    elif way == 5 and isinstance(home[key], int | float) and not isinstance(home[key], bool):
        home[key] = draw.choice((home[key] + 1, -home[key], home[key] * 1000, float(home[key]), str(home[key]), 10**12))
    elif way == 6 and isinstance(home[key], str):
        home[key] = draw.choice((home[key][:-1], home[key] + "x", home[key].upper(), [home[key]], {home[key]: 1}))
    else:
        home[key] = json.loads(json.dumps(draw.choice(ODD)))
    return value


def of_json(data: bytes, draw: random.Random) -> bytes:
    """Other JSON, most often; else other bytes."""
    if draw.random() < 0.4:
        return of_bytes(data, draw)
    return _written(lambda: json.dumps(of_table(json.loads(data), draw)), data, draw)


def of_lines(data: bytes, draw: random.Random) -> bytes:
    """One line of JSON changed, doubled or gone."""
    lines = data.splitlines(keepends=True)
    if draw.random() < 0.3 or not lines:
        return of_bytes(data, draw)
    at = draw.randrange(len(lines))
    way = draw.randrange(4)
    if way == 0:
        lines[at : at + 1] = []
    elif way == 1:
        lines[at : at + 1] = [lines[at]] * 2
    else:
        lines[at] = _written(lambda: json.dumps(of_table(json.loads(lines[at]), draw)), lines[at], draw) + b"\n"
    return b"".join(lines)


def of_toml(data: bytes, draw: random.Random) -> bytes:
    """Other TOML, most often; else other bytes."""
    if draw.random() < 0.3:
        return of_bytes(data, draw)

    def whole() -> str:
        return tomli_w.dumps(_without_none(of_table(tomllib.loads(data.decode()), draw)))

    return _written(whole, data, draw)


def _written(make: Callable[[], str], data: bytes, draw: random.Random) -> bytes:
    try:
        return make().encode("utf-8", "surrogatepass")
    except (RecursionError, TypeError, ValueError, AttributeError):  # what no writer writes: nested too deeply, half a letter
        return data[: len(data) // 2] + b"[" * draw.choice((10, 100_000)) + data[len(data) // 2 :]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value if item is not None] if isinstance(value, list) else value
