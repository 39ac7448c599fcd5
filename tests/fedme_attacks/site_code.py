"""A server that tries to run its own code at a site: by a bundle, by the kind of a run, by a lie about either."""

import hashlib
import json
from pathlib import Path
from textwrap import dedent

from flwr.cli.build import build_fab_from_disk
from flwr.proto.control_pb2 import StartRunRequest, StartRunResponse, StopRunRequest, StopRunResponse
from flwr.proto.fab_pb2 import Fab
from flwr.proto.run_pb2 import GetRunResponse

from fedme import __version__
from fedme.deployment.bundle import APP_ID, bundle_hash
from fedme.deployment.operator_folder import Federation
from fedme_attacks.federation import SITES, Loopback, control
from fedme_attacks.frame import attack
from fedme_attacks.hostile_proxy import HostileProxy
from fedme_test_deployment import Deployment, wait_for

INVALID_FAB = 7  # Flower's code of the refusal
MARKER = "code-of-the-server-ran"
PROMISE = "a site runs no code of the server, whatever it sends; the server gets an error reply, and the site stays connected"

# The server's own part of every app: it asks each node for a handshake and writes down the answers.
SERVER_APP = """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    where = Path(WHERE)
    while len(nodes := sorted(grid.get_node_ids())) < NODES:
        time.sleep(1)
    content = RecordDict({"body": ConfigRecord({"json": "{}"})})
    pushed = grid.push_messages([Message(content, dst_node_id=n, message_type="query.handshake", ttl=300) for n in nodes])
    pending, replies = set(pushed), []
    while pending:
        for reply in grid.pull_messages(list(pending)):
            pending.discard(reply.metadata.reply_to_message_id)
            replies.append([reply.error.code, reply.error.reason] if reply.has_error() else [None, ""])
        time.sleep(0.5)
    where.with_suffix(".partial").write_text(json.dumps(replies))
    where.with_suffix(".partial").rename(where)
"""
CLIENT_APP = """
import os
from pathlib import Path
from flwr.clientapp import ClientApp

Path(os.environ["FLWR_HOME"], "code-of-the-server-ran").touch()
app = ClientApp()

@app.query("handshake")
def handshake(message, context):
    raise RuntimeError("code of the server ran")
"""
# An agent app runs at the server first, where Flower starts it; from there it writes to every node, which starts it there too.
AGENT_APP = """
import json, os
from pathlib import Path
from flwr.agentapp import AgentApp

Path(os.environ["FLWR_HOME"], "code-of-the-server-ran").touch()
app = AgentApp()

@app.main()
def main(agent, context):
    def ask(tool, **arguments):
        return json.loads(agent.grid.call({"name": tool, "call_id": tool, "arguments": arguments})["output"])

    nodes = ask("get_nodes", sample_size=None)["nodes"]
    orders = [{"dst_node_id": node["id"], "payload": "obey", "reply_to_message_id": None} for node in nodes]
    sent = [result["message_id"] for result in ask("push_messages", messages=orders)["results"]]
    replies = ask("pull_messages", message_ids=sent, timeout=300)["messages"]
    where = Path(WHERE)
    where.with_suffix(".partial").write_text(json.dumps([[None, reply["error"]] for reply in replies]))
    where.with_suffix(".partial").rename(where)
"""


def app_folder(folder: Path, files: dict[str, str], **components: str) -> Path:
    """A Flower app with these files. Its part at the server asks every node and leaves the answers in `folder`."""
    table = "\n".join(f'{key} = "{value}"' for key, value in components.items())
    text = f"""
        [project]
        name = "fedme-run"
        version = "{__version__}"
        description = "an attack"
        license = "Apache-2.0"
        dependencies = []

        [tool.flwr.app]
        publisher = "fedme"

        [tool.flwr.app.config]
        run = ""

        [tool.flwr.app.components]
        """
    contents = {"pyproject.toml": dedent(text) + table + "\n", **files}
    for path, content in contents.items():
        content = content.replace("WHERE", repr(str(folder / "replies.json"))).replace("NODES", str(len(SITES)))
        (folder / "app" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "app" / path).write_text(content)
    return folder


def run_app(deployment: Deployment, folder: Path, prompt: str = "") -> list[tuple[int | None, str]]:
    """Let the server run the app in this folder, and return the reply of every node: the code and the text of its error.

    An agent app needs a prompt.
    """
    bundle = build_fab_from_disk(folder / "app")
    fab = Fab(hash_str=hashlib.sha256(bundle).hexdigest(), content=bundle)
    run = control(deployment, "start-run", StartRunRequest(fab=fab, user_prompt=prompt), StartRunResponse).run_id
    assert run, "the server did not accept the run"
    wait_for((folder / "replies.json").exists, "the replies of the sites")
    control(deployment, "stop-run", StopRunRequest(run_id=run), StopRunResponse)
    return [(code, text) for code, text in json.loads((folder / "replies.json").read_text())]


def require_no_code_ran(deployment: Deployment) -> None:
    """No site has the file that the server's code writes, or an unpacked app."""
    for name in SITES:
        home = deployment.site(name) / "state" / "flwr"
        assert home.is_dir(), f"{home} is not where site {name} keeps Flower's files"
        assert not (home / MARKER).exists(), f"code of the server ran at site {name}"
        assert not (home / "apps").exists(), f"site {name} unpacked an app"


def try_bundle(federation: Loopback, name: str, files: dict[str, str], **components: str) -> str:
    """Run an app whose code writes a file; every site must refuse it by name and stay connected."""
    deployment = federation.deployment
    files, components = {"hostile_server.py": SERVER_APP, **files}, {"serverapp": "hostile_server:app", **components}
    replies = run_app(deployment, app_folder(federation.scratch(name), files, **components))
    require_no_code_ran(deployment)
    assert len(replies) == len(SITES)
    for code, text in replies:
        assert code == INVALID_FAB, (code, text)
        assert f"only the app of its own FedMe {__version__}, but the server sent {APP_ID} {__version__}" in text, text
    federation.wait_until_connected(deployment)
    return f"{len(replies)} sites refused it: {replies[0][1]}"


@attack(by="server", promise=PROMISE)
def a_bundle_with_a_client_app(federation: Loopback) -> str:
    """The app of the bundle has its own client part."""
    return try_bundle(federation, "client-app", {"hostile.py": CLIENT_APP}, clientapp="hostile:app")


@attack(by="server", promise=PROMISE)
def a_bundle_with_a_module_that_shadows_fedme(federation: Loopback) -> str:
    """The app names FedMe's own client part, but has a package of the same name."""
    files = {"fedme/__init__.py": "", "fedme/deployment/__init__.py": "", "fedme/deployment/site_app.py": CLIENT_APP}
    return try_bundle(federation, "shadow", files, clientapp="fedme.deployment.site_app:app")


def try_lie(federation: Loopback, name: str, lie: "dict[str, str]", expected: str) -> list[str]:
    """Run an app with a hostile client part; site a is told that the run is another one. Returns what site a requested."""
    deployment, here = federation.deployment, Federation.read(federation.deployment.federation)

    def change(body: bytes) -> bytes:
        answer = GetRunResponse.FromString(body)
        for field, value in lie.items():
            setattr(answer.run, field, value)
        return bytes(answer.SerializeToString())

    files = {"hostile_server.py": SERVER_APP, "hostile.py": CLIENT_APP}
    folder = app_folder(federation.scratch(name), files, serverapp="hostile_server:app", clientapp="hostile:app")
    settings = deployment.site("a") / "site.toml"
    original = settings.read_text()
    with HostileProxy(here.control, here.server, {"get-run": change}) as proxy:
        try:
            deployment.stop("a")
            settings.write_text(original.replace(here.address, f"127.0.0.1:{proxy.port}"))
            deployment.node("a")
            federation.wait_until_connected(deployment)
            replies = run_app(deployment, folder)
            require_no_code_ran(deployment)
            assert any(expected in text for _, text in replies), replies
            assert "pull-messages" in proxy.requests, "site a did not connect through the lying server"
            federation.wait_until_connected(deployment)
        finally:
            deployment.stop("a")
            settings.write_text(original)
            deployment.node("a")
    federation.wait_until_connected(deployment)
    return proxy.requests


@attack(by="server", promise=PROMISE)
def a_bundle_with_an_agent_app(federation: Loopback) -> str:
    """Flower starts the agent app at the server; it writes to the nodes, where Flower would start it too."""
    deployment = federation.deployment
    folder = app_folder(federation.scratch("agent-app"), {"agent.py": AGENT_APP}, agentapp="agent:app")
    replies = run_app(deployment, folder, prompt="go")
    at_server = deployment.federation / "server" / "flwr" / MARKER
    assert at_server.exists(), "the agent app runs where nobody refuses it; otherwise this attack proves nothing"
    at_server.unlink()
    require_no_code_ran(deployment)
    expected = "this site runs client apps of FedMe only, but the server started a run of type flwr-agentapp"
    assert [text for _, text in replies] == [expected] * len(SITES), replies
    federation.wait_until_connected(deployment)
    return f"it ran at the server; {len(replies)} sites refused it: {expected}"


@attack(by="server", promise=PROMISE)
def a_bundle_with_the_name_and_hash_of_another(federation: Loopback) -> str:
    """The site is told that the bundle is FedMe's; it never asks for it, and its own client app answers."""
    lie = {"fab_id": APP_ID, "fab_version": __version__, "fab_hash": bundle_hash()}
    requests = try_lie(federation, "false-hash", lie, "TypedError'>:<'message: cannot be read")
    assert "get-run" in requests
    assert "get-fab" not in requests, "the site asked for the server's bundle"
    return "the site did not request the bundle; its own app refused the message"
