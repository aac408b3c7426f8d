"""The gRPC contracts against our own ports in this process, and against servers that differ."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from serve_app.cli.app import app
from serve_app.conformance import GRPC_CONTRACTS, find_checks, run
from serve_app.conformance.grpc_protocols import connect
from serve_app.proto.management_pb2 import ListModelsRequest, ManagementResponse, RegisterModelRequest
from serve_app.proto.management_pb2_grpc import ManagementAPIsServiceStub
from serve_app.proto.open_inference_grpc_pb2 import ModelInferResponse
from tests.support.handler_server import serve_handler_over_grpc
from tests.support.ports import free_port
from tests.support.protocol_servers import managed_by_grpc

__all__ = ["managed_by_grpc"]
pytestmark = pytest.mark.integration

TEXTS = """
    def read(row):
        body = row.get("data", row.get("body", row.get("input")))
        return body.decode() if isinstance(body, (bytes, bytearray)) else body

    def handle(data, context):
        return [str(read(row)).upper() for row in data] if data else []
"""
VALUES = {
    "BOOL": [True, False], "INT8": [1, -2], "INT16": [1, -2], "INT32": [1, -2], "INT64": [1, -2],
    "UINT8": [1, 2], "UINT16": [1, 2], "UINT32": [1, 2], "UINT64": [1, 2],
    "FP16": [0.5, 1.0], "FP32": [0.5, 1.0], "FP64": [0.5, 1.0], "BYTES": ["a", "bc"],
}  # fmt: skip


def check(contract: str, address: str, instance: Any = "a") -> list[str]:
    """Return the problems of a server, each after its requirement."""
    with connect(address, "m", instance, 30, {}) as server:
        return [f"{o.requirement}: {o.problem}" for o in run(contract, server) if o.problem]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "texts.py").write_text(textwrap.dedent(TEXTS))
    with serve_handler_over_grpc("m", "texts.py", tmp_path) as address:
        yield address


@pytest.fixture
def management(managed_by_grpc: Any) -> str:
    server = managed_by_grpc(control={"enable_model_api": True})
    stub = ManagementAPIsServiceStub(server.channel)
    stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar", initial_workers=1))
    return server.address


@pytest.mark.parametrize("contract", ["kserve-v2-grpc", "torchserve-grpc"])
def test_our_inference_port_conforms(contract: str, address: str) -> None:
    assert check(contract, address) == []


def test_our_management_port_conforms(management: str) -> None:
    assert check("torchserve-management-grpc", management) == []


@pytest.mark.parametrize("datatype", VALUES)
def test_tensors_of_all_datatypes_are_sent(datatype: str, address: str) -> None:
    instance = [{"name": "input", "shape": [2], "datatype": datatype, "data": VALUES[datatype]}]
    problems = check("kserve-v2-grpc", address, instance)
    assert problems == []


class Constant(grpc.GenericRpcHandler):
    """An answer to every call: a message, or a status."""

    def __init__(self, message: bytes | None) -> None:
        self.message = message

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self.message is None:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "nothing here")
            return self.message or b""

        if details.method.endswith("/StreamPredictions"):
            return grpc.unary_stream_rpc_method_handler(lambda *call: iter([answer(*call)]))
        return grpc.unary_unary_rpc_method_handler(answer)


class Pages(grpc.GenericRpcHandler):
    """The model ``other`` on the first page of models, and ``m`` on the second."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            first = ListModelsRequest.FromString(request).next_page_token == 0
            name = "other" if first else "m"
            page = {"models": [{"modelName": name, "modelUrl": f"{name}.mar"}]}
            text = json.dumps(page | ({"nextPageToken": "1"} if first else {}))
            return ManagementResponse(msg=text).SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)


@contextlib.contextmanager
def answering(message: bytes | grpc.GenericRpcHandler | None) -> Iterator[str]:
    handler = message if isinstance(message, grpc.GenericRpcHandler) else Constant(message)
    server = grpc.server(ThreadPoolExecutor(2), handlers=(handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize("contract", GRPC_CONTRACTS)
def test_servers_that_differ_are_found(contract: str) -> None:
    count = len(find_checks(contract))
    with answering(b"") as empty, answering(None) as unimplemented, answering(b"\xff\xff") as broken:
        assert len(check(contract, empty)) >= count - 1
        assert all("UNIMPLEMENTED, 'nothing here'" in p for p in check(contract, unimplemented))
        assert len(check(contract, unimplemented)) == count
        assert len(check(contract, broken)) >= count - 1
    closed = check(contract, f"127.0.0.1:{free_port()}")
    assert len(closed) == count and all("UNAVAILABLE" in problem for problem in closed)


def test_a_model_on_a_later_page_is_listed() -> None:
    with answering(Pages()) as address:
        problems = check("torchserve-management-grpc", address)
    assert not [problem for problem in problems if problem.startswith("ListModels")]


def tensor(datatype: str, size: int, raw: bytes | None = None, **contents: Any) -> bytes:
    response = ModelInferResponse(model_name="m", id="conformance-1")
    output = response.outputs.add(name="y", datatype=datatype, shape=[size])
    for field, values in contents.items():
        getattr(output.contents, field).extend(values)
    if raw is not None:
        response.raw_output_contents.append(raw)
    return response.SerializeToString()


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (tensor("FP32", 2, fp32_contents=[1, 2]), ""),
        (tensor("FP16", 2, raw=bytes(4)), ""),
        (tensor("BYTES", 2, raw=b"\1\0\0\0a\0\0\0\0"), ""),
        (tensor("FP32", 3, fp32_contents=[1, 2]), "the number of values of y with the shape [3] is 2"),
        (tensor("FP32", 2, raw=bytes(7)), "is 1.75; expected 2"),
        (tensor("BYTES", 1, raw=b"\2\0\0\0a"), "end within an element"),
        (tensor("BYTES", 1, raw=b"\2\0"), "end within an element"),
        (tensor("TEXT", 1), "'TEXT', which there is not"),
        (tensor("FP16", 1), "y is FP16, and has no raw_output_contents"),
    ],
)
def test_the_tensors_of_an_answer_are_counted(message: bytes, problem: str) -> None:
    with answering(message) as address:
        problems = check("kserve-v2-grpc", address)
    found = "".join(p.partition(": ")[2] for p in problems if p.startswith("ModelInfer answers"))
    assert problem in found and bool(problem) == bool(found)


def test_the_command(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*words: str) -> Any:
        return CliRunner().invoke(app, ["conformance", *words])

    shown = call("kserve-v2-grpc", "--url", address, "--model", "m")
    assert (shown.exit_code, shown.stdout.count("ok ")) == (0, len(find_checks("kserve-v2-grpc")))
    failed = call("torchserve-grpc", "--url", f"grpc://{address}/", "--model", "other", "--json")
    assert failed.exit_code == 1
    assert "the call is INTERNAL" in json.loads(failed.stdout)[1]["problem"]
    for url in ("nothing", "127.0.0.1", "ftp://a:1", "a:x", "[::1", "grpc://a:1/x"):
        refused = call("kserve-v2-grpc", "--url", url)
        assert refused.exit_code == 1 and "a server of gRPC is host:port" in " ".join(refused.output.split())


def test_the_key_of_a_server_of_this_machine_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: set[Any] = set()

    class Recorder(Constant):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            sent.add(dict(details.invocation_metadata).get("authorization"))
            return super().service(details)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "key_file.json").write_text('{"inference": {"key": "i"}, "management": {"key": "m"}}')
    server = grpc.server(ThreadPoolExecutor(2), handlers=(Recorder(b""),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    for contract, words_ in (
        ("kserve-v2-grpc", ()),
        ("torchserve-management-grpc", ()),
        ("torchserve-grpc", ("--token", "other")),
    ):
        CliRunner().invoke(app, ["conformance", contract, "--url", address, *words_])
    server.stop(0).wait()
    assert sent == {"Bearer i", "Bearer m", "Bearer other"}
