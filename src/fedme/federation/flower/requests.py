"""Ask many clients at once and take the replies as they come: Flower's grid with finite patience."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError

from fedme.core.typed import TypedError
from fedme.federation.flower.message_content import ROOM, Envelope

Node = int
WRAPPED = "occurred. Message: "
TRIES = 20  # to hand over one message while Flower's server comes and goes
K = TypeVar("K")


@dataclass(frozen=True)
class Failure:
    """Why there is no reply, or none that can be read."""

    reason: str
    offence: bool = False  # something came, but it was no message


@dataclass
class Link:
    """The server's end of Flower. `look` is called at every look for replies and may raise."""

    grid: Grid
    pause: float  # seconds between two looks
    timeout: float | None = None  # seconds until a client counts as missing; without one it is waited for
    look: Callable[[], None] = lambda: None

    def nodes(self) -> list[Node]:
        """Who is connected."""
        return sorted(self.grid.get_node_ids())

    def ask(
        self,
        kind: str,
        asked: Mapping[K, tuple[Node, Envelope]],
        heard: Callable[[K], None] = lambda who: None,
        most: Callable[[K], int] = lambda who: ROOM,
    ) -> dict[K, Envelope | Failure]:
        """Every reply, or why there is none, by who was asked; `most` is how many bytes somebody may send.

        Replies are told apart by the message they answer: a second one to the same message, or one to a message that is not
        waited for any more, is never looked at.
        """
        replies: dict[K, Envelope | Failure] = {}
        waiting: dict[str, K] = {}
        for who, (node, envelope) in asked.items():  # one by one: a refused message must not shift the others
            if number := self._pushed(kind, node, envelope):
                waiting[number] = who
            else:
                replies[who] = Failure("not connected")
        until = time.monotonic() + self.timeout if self.timeout is not None else None
        while waiting:
            for reply in self._pulled(waiting):
                number = reply.metadata.reply_to_message_id
                if number in waiting:
                    who = waiting.pop(number)
                    replies[who] = _opened(reply, most(who))
                    heard(who)
            if waiting and until is not None and time.monotonic() > until:
                replies.update({who: Failure(f"no reply within {self.timeout:.0f} s") for who in waiting.values()})
                break
            self.look()
            if waiting:
                time.sleep(self.pause)
        return {who: replies[who] for who in asked}

    def _pushed(self, kind: str, node: Node, envelope: Envelope) -> str:
        """The number of a message that is on its way; empty if nobody is there for it."""
        for tries_left in reversed(range(TRIES)):
            message = Message(envelope.content(), dst_node_id=node, message_type=kind, ttl=self.timeout)
            try:
                return next(iter(self.grid.push_messages([message])), "")
            except ObjectPushError:  # Flower's server was started again in between, and knows nothing of half a message
                if not tries_left:
                    raise
                self.look()
                time.sleep(self.pause)
        return ""

    def _pulled(self, waiting: Mapping[str, K]) -> list[Message]:
        """What has come; a reply that could not be had whole is asked for again."""
        try:
            return list(self.grid.pull_messages(list(waiting)))
        except ObjectPullError:
            return []


def _opened(reply: Message, most: int) -> Envelope | Failure:
    if reply.has_error():
        return Failure(said(reply.error.code, reply.error.reason))
    try:
        return Envelope.opened(reply.content, most)
    except TypedError as error:
        return Failure(f"refused: {error}", offence=True)


def said(code: int, reason: str | None) -> str:
    """Flower's error in one line. An exception arrives as its class and its text, in a simulation inside another one."""
    text = " ".join((reason or f"error {code}").split())
    if text.startswith("<class '") and "'>:<" in text:
        kind, _, words = text.removeprefix("<class '").partition("'>:<")
        words = words.strip("<>'\" ")
        return words.partition(WRAPPED)[2] if WRAPPED in words else f"{kind.rpartition('.')[2]}: {words}"
    return text
