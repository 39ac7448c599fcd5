"""Flower's grid without its processes: every message is answered immediately, in this process."""

import itertools
from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity


class Grid:
    """Passes every message to `answer`; an exception becomes an error reply, as with Flower."""

    def __init__(self, nodes: Iterable[int], answer: Callable[[Message], Message]) -> None:
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # Flower's programs set these at their start
        self.nodes, self.answer = list(nodes), answer
        self.numbers, self.replies = itertools.count(), dict[str, Message]()

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def push_messages(self, messages: list[Message]) -> list[str]:
        for message in messages:
            number = f"message-{next(self.numbers)}"
            message.metadata.__dict__.update(_message_id=number, _src_node_id=1)
            try:
                self.replies[number] = self.answer(message)
            except Exception as error:
                self.replies[number] = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, numbers: list[str]) -> list[Message]:
        return [self.replies.pop(number) for number in numbers if number in self.replies]


def context(node: int = 1, **settings: str) -> Context:
    return Context(1, node, settings, RecordDict(), {})
