"""The two programs of a deployment as Flower starts them: one loop at the server, and what a site does with a message."""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedme.federation.flower.message_content import Envelope

Answering = Callable[[Envelope, Mapping[str, Any]], Envelope]  # a message and the node's own settings -> the reply


def server_app(main: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """A server app that runs `main` with the grid and the run's settings."""
    app = ServerApp()

    @app.main()
    def start(grid: Grid, context: Context) -> None:
        main(grid, context.run_config)

    return app


def client_app(hello: Answering, train: Answering, evaluate: Answering) -> ClientApp:
    """A client app that answers three kinds of messages."""
    app = ClientApp()

    def answered(by: Answering, message: Message, context: Context) -> Message:
        reply = by(Envelope.opened(message.content), context.node_config)
        return Message(reply.content(), reply_to=message)

    @app.query("hello")
    def say_hello(message: Message, context: Context) -> Message:
        return answered(hello, message, context)

    @app.train()
    def participate(message: Message, context: Context) -> Message:
        return answered(train, message, context)

    @app.evaluate()
    def evaluate_models(message: Message, context: Context) -> Message:
        return answered(evaluate, message, context)

    return app
