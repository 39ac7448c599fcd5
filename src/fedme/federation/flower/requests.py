"""Send requests to many clients at once and collect the replies as they arrive, with a timeout, over Flower's grid."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError

from fedme.core.typed import TypedError
from fedme.federation.flower.message_content import MAX_BYTES, MessageContent

Node = int
WRAPPER = "occurred. Message: "  # precedes the original text when Flower wraps one exception in another
PUSH_ATTEMPTS = 20  # per message, while Flower's server restarts
K = TypeVar("K")


@dataclass(frozen=True)
class Failure:
    """Why there is no usable reply."""

    reason: str
    offence: bool = False  # the client replied, but with an unreadable message


@dataclass
class GridRequests:
    """The server's end of Flower's grid. `on_poll` is called at every poll for replies and may raise."""

    grid: Grid
    poll_interval: float  # seconds
    timeout: float | None = None  # seconds until a client counts as missing; None: wait forever
    on_poll: Callable[[], None] = lambda: None

    def nodes(self) -> list[Node]:
        """The connected nodes."""
        return sorted(self.grid.get_node_ids())

    def send(
        self,
        message_type: str,
        requests: Mapping[K, tuple[Node, MessageContent]],
        on_reply: Callable[[K], None] = lambda client: None,
        max_bytes: Callable[[K], int] = lambda client: MAX_BYTES,
    ) -> dict[K, MessageContent | Failure]:
        """Send one request per client and return every reply, or why there is none; `max_bytes` limits a client's reply.

        Replies are matched by the id of the request. A second reply to a request, or a reply after the timeout, is ignored.
        """
        replies: dict[K, MessageContent | Failure] = {}
        pending: dict[str, K] = {}
        for client, (node, content) in requests.items():  # one by one: a rejected message must not shift the ids of others
            if message_id := self._push(message_type, node, content):
                pending[message_id] = client
            else:
                replies[client] = Failure("not connected")
        deadline = time.monotonic() + self.timeout if self.timeout is not None else None
        while pending:
            for reply in self._pull(pending):
                message_id = reply.metadata.reply_to_message_id
                if message_id in pending:
                    client = pending.pop(message_id)
                    replies[client] = _read(reply, max_bytes(client))
                    on_reply(client)
            if pending and deadline is not None and time.monotonic() > deadline:
                replies.update({client: Failure(f"no reply within {self.timeout:.0f} s") for client in pending.values()})
                break
            self.on_poll()
            if pending:
                time.sleep(self.poll_interval)
        return {client: replies[client] for client in requests}

    def _push(self, message_type: str, node: Node, content: MessageContent) -> str:
        """Send a message and return its id; the id is empty if the node is not connected."""
        for attempts_left in reversed(range(PUSH_ATTEMPTS)):
            message = Message(content.to_records(), dst_node_id=node, message_type=message_type, ttl=self.timeout)
            try:
                return next(iter(self.grid.push_messages([message])), "")
            except ObjectPushError:  # Flower's server restarted and has forgotten the first part of the message
                if not attempts_left:
                    raise
                self.on_poll()
                time.sleep(self.poll_interval)
        return ""

    def _pull(self, pending: Mapping[str, K]) -> list[Message]:
        """The replies that have arrived; an incomplete one is pulled again at the next poll."""
        try:
            return list(self.grid.pull_messages(list(pending)))
        except ObjectPullError:
            return []


def _read(reply: Message, max_bytes: int) -> MessageContent | Failure:
    if reply.has_error():
        return Failure(error_text(reply.error.code, reply.error.reason))
    try:
        return MessageContent.from_records(reply.content, max_bytes)
    except TypedError as error:
        return Failure(f"refused: {error}", offence=True)


def error_text(code: int, reason: str | None) -> str:
    """Flower's error on one line. Flower sends an exception as its class and text; a simulation wraps it in another one."""
    text = " ".join((reason or f"error {code}").split())
    if text.startswith("<class '") and "'>:<" in text:
        class_name, _, message = text.removeprefix("<class '").partition("'>:<")
        message = message.strip("<>'\" ")
        return message.partition(WRAPPER)[2] if WRAPPER in message else f"{class_name.rpartition('.')[2]}: {message}"
    return text
