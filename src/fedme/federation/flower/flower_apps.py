"""The two apps that Flower starts: the server's main function, and a client's message handlers."""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedme.federation.flower.message_content import MessageContent

Handler = Callable[[MessageContent, Mapping[str, Any]], MessageContent]  # (request, node settings) -> reply


def server_app(main: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """Create a server app that calls `main` with the grid and the settings of the run."""
    app = ServerApp()

    @app.main()
    def start(grid: Grid, context: Context) -> None:
        main(grid, context.run_config)

    return app


def client_app(handlers: Mapping[str, Handler]) -> ClientApp:
    """Create a client app from its handlers by message type ("train", "evaluate", "query.handshake")."""
    app = ClientApp()

    def adapt(handler: Handler) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            reply = handler(MessageContent.from_records(message.content), context.node_config)
            return Message(reply.to_records(), reply_to=message)

        return handle

    for message_type, handler in handlers.items():
        category, *action = message_type.split(".")
        getattr(app, category)(*action)(adapt(handler))
    return app
