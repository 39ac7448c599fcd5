"""How large a reply may be, and the account of a reply that is arriving. Sizes are checked before anything is built.

The server app and the proxy in front of Flower's server keep the same account: the proxy refuses early, the server app surely.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fedme.federation.flower.internals import CHUNK_BYTES, FlowerObject, Unreadable

TEXT_BYTES = 1 << 22  # of a reply beside its arrays: names, plain values, notes
OBJECTS = 8  # of a reply without arrays: Message, RecordDict, records
HEAD_BYTES = 256  # of an object that has no children


@dataclass(frozen=True)
class ReplyLimit:
    """The largest reply that a client may send: bytes of all its arrays, and their number."""

    array_bytes: int = 1 << 36
    arrays: int = 1 << 20

    @property
    def bytes(self) -> int:
        """The most bytes of a reply."""
        return self.array_bytes + TEXT_BYTES

    @property
    def objects(self) -> int:
        """The most objects of a reply: every array has a description and chunks."""
        return OBJECTS + 2 * self.arrays + self.array_bytes // CHUNK_BYTES

    def __or__(self, other: "ReplyLimit") -> "ReplyLimit":
        return ReplyLimit(max(self.array_bytes, other.array_bytes), max(self.arrays, other.arrays))


SMALLEST = ReplyLimit(0, 0)  # of a reply without arrays, such as a handshake


class TooLarge(Unreadable):
    """A reply is larger than any that its experiment allows."""


class ReplyAccount:
    """What has arrived of one reply."""

    def __init__(self, limit: ReplyLimit, ids: Iterable[str] = ()) -> None:
        self.limit, self.ids = limit, frozenset(ids)
        self.text = self.arrays = 0  # bytes: as received, and of arrays once they are put together
        self.chunks: dict[str, int] = {}  # sizes
        self.uses: Counter[str] = Counter()  # how often arrays refer to a chunk

    def add(self, name: str, content: bytes) -> None:
        """Add an object, or raise if the reply becomes too large with it."""
        item = FlowerObject.read(content)
        if item.type == "ArrayChunk":
            if item.size > CHUNK_BYTES or len(content) > CHUNK_BYTES + HEAD_BYTES:
                raise TooLarge(f"a part of an array has {len(content)} bytes, expected at most {CHUNK_BYTES}")
            if name not in self.chunks:
                self.chunks[name] = item.size
                self.arrays += self.uses[name] * item.size
                self.text += 0 if self.uses[name] else item.size  # nobody refers to it yet
        else:
            self.text += len(content)
            for chunk in item.chunks:
                known = self.chunks.get(chunk, 0)
                self.text -= 0 if self.uses[chunk] else known
                self.uses[chunk] += 1
                self.arrays += known
                if self.arrays > self.limit.bytes:
                    break
        if self.text + self.arrays > self.limit.bytes:
            size = f"at least {self.text + self.arrays} bytes"
            raise TooLarge(f"the reply has {size}, expected at most {self.limit.bytes}")
