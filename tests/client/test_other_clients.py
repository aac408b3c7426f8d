"""The code for each client of examples/18_every_client runs against servers in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http

from serve_app.domain import tensors
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from tests.support.inference_functions import streaming

PAGE = (Path(__file__).parents[2] / "examples/18_every_client/README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TABLE = RoutingTable(
    1,
    {name: ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)}) for name in ("digits", "rhymes")},
    startup_complete=True,
)


def run(example: str, capsys: pytest.CaptureFixture[str], **addresses: str) -> list[str]:
    """Run the example that contains every original address, with these in their places; return its output."""
    [code] = [code for code in EXAMPLES if example in code]
    for port, address in addresses.items():
        assert f"127.0.0.1:{port[1:]}" in code
        code = code.replace(f"127.0.0.1:{port[1:]}", address.removeprefix("http://"))
    exec(code, {"__name__": "example"})
    return capsys.readouterr().out.splitlines()


async def double(request: InferenceRequest) -> InferenceResponse:
    [array] = [
        tensors.from_content_type(part.name, part.value, part.content_type or "").to_array()
        for part in request.inputs
        if part.name == "x"
    ]
    return InferenceResponse(
        tensors.pack([tensors.from_array("y", array[:1] * 2)]), tensors.PACKED_MEDIA_TYPE
    )


def test_tritonclient(
    inference: Any, over_http: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its finalizer must not run in another thread.
    monkeypatch.delattr(tritonclient.http.InferenceServerClient, "__del__")
    address = over_http(inference(double, TABLE).app)
    assert run("tritonclient", capsys, _8080=address) == ["[[2. 2. 2. 2.]]"]


def test_openai(inference: Any, over_http: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async def complete(request: InferenceRequest) -> InferenceResponse | ResponseStream:
        if json.loads(request.inputs[0].value).get("stream"):
            events = [json.dumps({"choices": [{"delta": {"content": text}}]}) for text in ("a ", "lamb")]
            return await streaming(*(f"data: {event}\n\n".encode() for event in events))(request)
        message = {"role": "assistant", "content": "a little lamb"}
        return InferenceResponse(json.dumps({"choices": [{"message": message}]}).encode(), version="1.0")

    address = over_http(inference(complete, TABLE).app)
    assert run("openai", capsys, _8080=address) == ["a little lamb", "a lamb"]


def test_grpc_stubs(over_grpc: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = over_grpc(streaming(b"1", b"2"), TABLE)
    assert run("import grpc", capsys, _7070=server.address) == ["b'12'", "b'1'", "b'2'"]
    [first, _] = server.backend.requests
    assert [(part.name, part.value) for part in first.inputs] == [("data", b"one")]


def test_websockets(inference: Any, over_http: Any, capsys: pytest.CaptureFixture[str]) -> None:
    address = over_http(inference(streaming(b"1", b"2"), TABLE).app)
    assert run("websockets", capsys, _8080=address) == ["1", "2", "200"]
