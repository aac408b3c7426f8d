"""Tensors and the model repository over gRPC, with both clients."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from client_helpers import ClientFactory

from serve_app import errors
from serve_app.client import errors as client_errors
from serve_app.domain import tensors
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream

DATATYPES = {
    "BOOL": np.array([True, False]),
    **{
        name: np.array([1, 2], name.lower())
        for size in (8, 16, 32, 64)
        for name in (f"INT{size}", f"UINT{size}")
    },
    "FP16": np.array([1.5, -2], np.float16),
    "FP32": np.array([1.5, -2], np.float32),
    "FP64": np.array([1.5, -2], np.float64),
    "BYTES": np.array([b"\xff", b""], np.object_),
}


async def reverse(request: InferenceRequest) -> InferenceResponse:
    """Respond with each input reversed, under its name, and with a text."""
    received = [tensors.from_content_type(i.name, i.value, i.content_type or "") for i in request.inputs]
    reversed_tensors = [
        t.name.endswith("parameters") or tensors.from_array(t.name, t.to_array()[::-1], t.datatype)
        for t in received
    ]
    return InferenceResponse(
        tensors.pack([t for t in reversed_tensors if t is not True] + [tensors.from_array("t", ["a"])]),
        tensors.PACKED_MEDIA_TYPE,
    )


@pytest.mark.parametrize("binary", [True, False])
def test_every_datatype(make_client: ClientFactory, over_grpc: Any, binary: bool) -> None:
    inputs = {name: value for name, value in DATATYPES.items() if binary or name != "FP16"}
    client = make_client(over_grpc(reverse))
    outputs = client.infer("m", inputs, binary=binary)
    assert outputs.pop("t").tolist() == [b"a"]
    for name, value in inputs.items():
        assert outputs[name].dtype == value.dtype, name
        np.testing.assert_array_equal(outputs[name], value[::-1])
    if binary:
        outputs = client.infer("m", {"x": np.array([1.5, 2], np.float32)}, ["x"], datatypes={"x": "BF16"})
        assert {name: value.tolist() for name, value in outputs.items()} == {"x": [2, 1.5]}
    else:
        with pytest.raises(ValueError, match="FP16, which has no typed contents"):
            client.infer("m", {"x": DATATYPES["FP16"]}, binary=False)
        with pytest.raises(ValueError, match="parameter p is list"):
            client.infer("m", {"x": [1]}, parameters={"p": []})


def test_version_headers_and_timeout_of_an_inference(make_client: ClientFactory, over_grpc: Any) -> None:
    server = over_grpc(reverse)
    make_client(server).infer(
        "m", {"x": [1]}, version="2.0", headers={"X-Mine": "1"}, timeout=30, parameters={"p": True}
    )
    [request] = server.backend.requests
    assert (request.version, request.headers["x-mine"]) == ("2.0", "1")
    assert 0 < request.deadline - time.time() < 31


def test_many_inferences_over_one_stream(make_client: ClientFactory, over_grpc: Any) -> None:
    async def infer(request: InferenceRequest) -> InferenceResponse | ResponseStream:
        count = int(
            tensors.from_content_type(
                "x", request.inputs[0].value, request.inputs[0].content_type or ""
            ).to_array()[0]
        )
        if count < 0:
            raise errors.QueueFull("m", "1.0")
        if not count:
            return InferenceResponse(tensors.pack([tensors.from_array("y", [0])]), tensors.PACKED_MEDIA_TYPE)

        async def chunks() -> AsyncIterator[bytes]:
            for number in range(count):
                yield b"%d" % number

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    outputs = list(make_client(over_grpc(infer)).infer_stream("m", [{"x": [count]} for count in (0, -1, 2)]))
    assert [(output.request_index, output.final) for output in outputs] == [
        (0, True),
        (1, True),
        (2, False),
        (2, False),
        (2, True),
    ]
    assert isinstance(outputs[1].error, client_errors.QueueFullError)
    assert (outputs[1].error.reason, outputs[1].error.retry_after, len(outputs[1].error.request_id)) == (
        "queue_full",
        1,
        36,
    )
    assert [output.error for output in outputs if output is not outputs[1]] == [None] * 4
    assert outputs[0].arrays["y"].tolist() == [0]
    assert [output.arrays["output-0"].tolist() for output in outputs[2:4]] == [[b"0"], [b"1"]]
    assert outputs[4].arrays == {}


def test_repository_errors(make_client: ClientFactory, over_grpc: Any, inference: Any) -> None:
    class MissingModels:
        def __getattr__(self, operation: str) -> Any:
            async def fail(*args: Any) -> Any:
                raise errors.ModelNotFound("x")

            return fail

    client = make_client(over_grpc(control_api=MissingModels()))
    for call in (lambda: client.load("x", url="x.mar", workers=1), lambda: client.unload("x")):
        with pytest.raises(client_errors.NotFoundError, match="x"):
            call()
    with pytest.raises(ValueError, match="parameter p is float"):
        client.load("x", p=1.5)
