"""Print a data set of an installed or unpacked R package as CSV, without R; needs `pip install rdata`.

python benchmarks/r_data.py LIBRARY/survival/data lung > lung.csv
"""

import bz2
import gzip
import lzma
import sys
import warnings
import zlib
from pathlib import Path

import pandas
import rdata


def read(folder: Path, name: str) -> pandas.DataFrame:
    """A data set from the index (.rdx) and the database (.rdb) of the package's folder `data`."""
    index = _converted(gzip.decompress((folder / "Rdata.rdx").read_bytes()))["variables"]
    if name not in index:
        raise SystemExit(f"{folder}: there is no data set '{name}'; there are {', '.join(map(str, index))}")
    offset, length = map(int, index[name])
    entry = (folder / "Rdata.rdb").read_bytes()[offset : offset + length]
    kind, content = entry[4:5], entry[5:]  # the first four bytes are the size
    if kind == b"Z":
        return _converted(lzma.decompress(content, lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}]))
    return _converted(bz2.decompress(content) if kind == b"2" else zlib.decompress(entry[4:]))


def _converted(content: bytes) -> pandas.DataFrame:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the database has no file header
        return rdata.conversion.convert(rdata.parser.parse_data(content))


if __name__ == "__main__":
    read(Path(sys.argv[1]), sys.argv[2]).to_csv(sys.stdout, index=False)
