"""Flower's code that `federation/flower/internals.py` was written against. A change there must be read before it is trusted."""

import ast
import datetime
import hashlib
import importlib
import inspect
import textwrap
from base64 import b64encode

import pytest

from fedme.federation.flower import internals

pytestmark = pytest.mark.needs("flwr")

READ = {  # what was read, and the first digits of the SHA-256 of its code without comments
    "flwr.superlink.grid.http_grid:HttpGrid.pull_messages": "d35ceb820b03",
    "flwr.superlink.grid.http_grid:HttpGrid._runtime_client": "2d2f2b5b38b4",
    "flwr.superlink.grid.http_grid:HttpGrid.run": "a14b71ded502",
    "flwr.superlink.grid.http_grid:HttpGrid._try_push_messages": "3b7f2c4f97f6",
    "flwr.supercore.inflatable.inflatable_utils:inflate_object_from_contents": "0977e2007f75",
    "flwr.supercore.inflatable.inflatable_utils:validate_object_content": "744ffad6eece",
    "flwr.supercore.inflatable.inflatable_utils:ObjectPushError": "edd1eda2edc3",
    "flwr.supercore.inflatable.inflatable_protobuf_utils:make_pull_object_fn_protobuf": "48347b32dfa0",
    "flwr.supercore.inflatable.inflatable_object:add_header_to_object_body": "917d131df8bd",
    "flwr.supercore.inflatable.inflatable_object:get_object_head_values_from_object_content": "b7654f771ef4",
    "flwr.app.message.array:Array.inflate": "c40cffef577d",
    "flwr.app.message.array:Array.deflate": "4ab40797cc4b",
    "flwr.app.message.array:Array.slice_array": "110b26829202",
    "flwr.superlink.routers.fleet.node_auth:authenticate_node": "63c212d49767",
    "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor.intercept": "bc4bc34b938c",
    "flwr.supercore.protobuf.translation:ProtobufTranslationMiddleware.dispatch": "ddaa29c1496d",
    "flwr.superlink.servicer.fleet.fleet_handlers:push_messages": "7549b3c575ca",
    "flwr.superlink.servicer.fleet.fleet_handlers:push_object": "c97fa39d6be1",
    "flwr.superlink.servicer.runtime.runtime_handlers:pull_messages": "39d75d81780b",
    "flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.get_message_res": "0d2aaa35c226",
    "flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.store_message_res": "7b0e64d57a36",
}


def digest(name):
    """Of the code behind a dotted name, without comments and layout."""
    module, _, path = name.partition(":")
    value = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    source = textwrap.dedent(inspect.getsource(value.fget if isinstance(value, property) else value))
    return hashlib.sha256(ast.unparse(ast.parse(source)).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", READ)
def test_the_code_is_the_one_that_was_read(name):
    assert digest(name) == READ[name], f"{name} has changed: read it, mend internals.py, then write the new digest here"


def test_constants_are_those_of_flower():
    from flwr.app.message import array
    from flwr.common import constant as common
    from flwr.supercore import constant
    from flwr.supercore.inflatable import inflatable_utils
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    assert array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE == internals.CHUNK_BYTES
    assert common.SYSTEM_TIME_TOLERANCE == internals.CLOCKS
    assert common.TIMESTAMP_TOLERANCE + common.SYSTEM_TIME_TOLERANCE == internals.AGE
    assert constant.HEAD_BODY_DIVIDER == b"\0"
    assert constant.HEAD_VALUE_DIVIDER == " "
    assert set(internals.TYPES) == set(inflatable_utils.inflatable_class_registry) - {"MetricRecord"}
    fleet = {path.rpartition("/")[2]: kind for (_, path), kind in PROTOBUF_REQUEST_TYPES.items() if "/fleet/" in path}
    assert fleet == internals.REQUESTS


def test_signatures_are_those_of_flowers_nodes():
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.date import now
    from flwr.supercore.primitives import asymmetric

    private, public = asymmetric.generate_key_pairs()

    def headers(when, by=private):
        signature = asymmetric.sign_message(by, when.isoformat().encode())
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(asymmetric.public_key_to_bytes(public)).decode(),
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
            TIMESTAMP_HEADER: when.isoformat(),
        }

    def by(headers):
        return internals.signed_by(headers, now())

    assert by(headers(now())) == internals.key_bytes(public)
    assert by(headers(now(), asymmetric.generate_key_pairs()[0])) is None
    assert by(headers(now() - datetime.timedelta(seconds=310))) is None
    assert by(headers(now() + datetime.timedelta(seconds=10))) is None
    assert by({}) is None
    for name in headers(now()):
        assert by(headers(now()) | {name: "\u00e9 no base64"}) is None
        assert by(headers(now()) | {name: ""}) is None
    assert by(headers(datetime.datetime.now())) is None  # a time without a zone
