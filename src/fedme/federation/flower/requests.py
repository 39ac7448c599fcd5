"""Send requests to many clients at once and collect the replies as they arrive, with a timeout, over Flower's grid."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from fedme.core.foreign_text import one_line
from fedme.core.typed import TypedError
from fedme.federation.flower.internals import Incoming, Unreadable, push_error
from fedme.federation.flower.message_content import MessageContent
from fedme.federation.flower.reply_limits import ReplyAccount, ReplyLimit

Node = int
WRAPPER = "occurred. Message: "  # precedes the original text when Flower wraps one exception in another
PUSH_ATTEMPTS = 20  # per message, while Flower's server restarts
ANY_SIZE = ReplyLimit()
LONGEST = 1000  # characters of an error that a client sends
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
    refusals: Callable[[], Mapping[str, str]] = dict  # why the proxy has refused the reply to a request, by the request's id

    def __post_init__(self) -> None:
        self._incoming = Incoming(self.grid)
        self._accounts: dict[str, ReplyAccount] = {}  # of replies that are arriving, by request

    def nodes(self) -> list[Node]:
        """The connected nodes."""
        return sorted(self.grid.get_node_ids())

    def send(
        self,
        message_type: str,
        requests: Mapping[K, tuple[Node, MessageContent]],
        on_reply: Callable[[K], None] = lambda client: None,
        limit: Callable[[K], ReplyLimit] = lambda client: ANY_SIZE,
    ) -> dict[K, MessageContent | Failure]:
        """Send one request per client and return every reply, or why there is none; `limit` bounds a client's reply.

        Replies are fetched and read one by one: a bad one is a failure of its sender, and one whose parts are withheld does not
        hold up the others. A second reply to a request, or a reply after the timeout, is ignored.
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
            refused = self.refusals()
            for message_id, client in list(pending.items()):
                node = requests[client][0]
                reply = self._reply(message_id, node, limit(client))
                if reply is None and message_id in refused:
                    reply = Failure(f"refused: {refused[message_id]}", offence=True)
                if reply is not None:
                    del pending[message_id]
                    replies[client] = reply
                    self._forget(message_id)
                    on_reply(client)
            if pending and deadline is not None and time.monotonic() > deadline:
                for message_id, client in pending.items():
                    incomplete = " of the whole message" if message_id in self._accounts else ""
                    replies[client] = Failure(f"no reply{incomplete} within {self.timeout:.4g} s")
                    self._forget(message_id)
                break
            self.on_poll()
            if pending:
                time.sleep(self.poll_interval)
        return {client: replies[client] for client in requests}

    def _push(self, message_type: str, node: Node, content: MessageContent) -> str:
        """Send a message and return its id; the id is empty if the node is not connected."""
        forgotten = push_error()
        for attempts_left in reversed(range(PUSH_ATTEMPTS)):
            message = Message(content.to_records(), dst_node_id=node, message_type=message_type, ttl=self.timeout)
            try:
                return next(iter(self.grid.push_messages([message])), "")
            except forgotten:  # Flower's server restarted and has forgotten the first part of the message
                if not attempts_left:
                    raise
                self.on_poll()
                time.sleep(self.poll_interval)
        return ""

    def _reply(self, message_id: str, node: Node, limit: ReplyLimit) -> MessageContent | Failure | None:
        """The reply to a request, or what is wrong with it; None if it has not arrived."""
        try:
            reply = self._pull(message_id, limit)
            if reply is None:
                return None
            if reply.has_error():
                return Failure(error_text(reply.error.code, reply.error.reason))
            if reply.metadata.src_node_id != node:
                return Failure(f"refused: it was sent by node {reply.metadata.src_node_id}, not by the one that was asked")
            return MessageContent.from_records(reply.content, limit.bytes)
        except (Unreadable, TypedError) as error:
            return Failure(f"refused: {one_line(str(error))}", offence=True)

    def _pull(self, message_id: str, limit: ReplyLimit) -> Message | None:
        """The reply to a request once all of it is there."""
        if not self._incoming.remote:  # in this process
            arrived = self.grid.pull_messages([message_id])
            return next((reply for reply in arrived if reply.metadata.reply_to_message_id == message_id), None)
        if not self._incoming.claim(message_id, limit.objects):
            return None
        account = self._accounts.setdefault(message_id, ReplyAccount(limit))
        for name, content in self._incoming.fetch(message_id):
            account.add(name, content)
        return self._incoming.build(message_id) if self._incoming.complete(message_id) else None

    def _forget(self, message_id: str) -> None:
        self._accounts.pop(message_id, None)
        self._incoming.forget(message_id)


def error_text(code: int, reason: str | None) -> str:
    """Flower's error on one line. Flower sends an exception as its class and text; a simulation wraps it in another one."""
    text = one_line(reason or f"error {code}", LONGEST)
    if text.startswith("<class '") and "'>:<" in text:
        class_name, _, message = text.removeprefix("<class '").partition("'>:<")
        message = message.strip("<>'\" ")
        return message.partition(WRAPPER)[2] if WRAPPER in message else f"{class_name.rpartition('.')[2]}: {message}"
    return text
