"""Tensors, OpenAI, health and management over HTTP, with both clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from client_helpers import ClientFactory

from serve_app import errors
from serve_app.client import errors as client_errors
from serve_app.domain import tensors
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import RoutingTable


@pytest.mark.parametrize("binary", [True, False])
def test_tensors_are_sent_and_received(make_client: ClientFactory, inference: Any, binary: bool) -> None:
    async def backwards(request: InferenceRequest) -> InferenceResponse:
        [tensor] = [
            tensors.from_content_type(i.name, i.value, i.content_type or "")
            for i in request.inputs
            if i.name == "x"
        ]
        return InferenceResponse(
            tensors.pack([tensors.from_array("y", tensor.to_array()[::-1]), tensors.from_array("t", ["a"])]),
            tensors.PACKED_MEDIA_TYPE,
        )

    outputs = make_client(inference(backwards)).infer(
        "m", {"x": np.array([1.5, 2], np.float32)}, binary=binary
    )
    assert outputs["y"].dtype == np.float32
    np.testing.assert_array_equal(outputs["y"], [2, 1.5])
    assert outputs["t"].tolist() == [b"a"]


def test_open_inference_metadata(make_client: ClientFactory, inference: Any) -> None:
    client = make_client(inference())
    assert client.model_ready("m", "2.0") is True
    assert client.metadata("m")["versions"] == ["1.0", "2.0"]
    assert [row["version"] for row in client.repository()] == ["1.0", "2.0"]
    assert client.config("m")["backend"] == "torchrelay"


async def openai(request: InferenceRequest) -> InferenceResponse | ResponseStream:
    """Respond to requests of OpenAI's API with the requested path."""
    body = json.loads(request.inputs[0].value) if request.inputs[0].content_type == "application/json" else {}
    if request.headers["url_path"].endswith("embeddings"):
        return InferenceResponse(b"[0.5, 1.0]", version="1.0")
    if not body.get("stream"):
        return InferenceResponse(
            json.dumps({"choices": [{"text": request.headers["url_path"]}]}).encode(), version="1.0"
        )

    async def chunks() -> AsyncIterator[bytes]:
        for text in ("a", "b"):
            yield b"data: %b\n\n" % json.dumps({"choices": [{"text": text}]}).encode()
        if body.get("fails"):
            raise errors.ReplicaDied("killed")
        yield b"data: [DONE]\n\n"

    return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())


def test_openai_operations(make_client: ClientFactory, inference: Any) -> None:
    client = make_client(inference(openai))
    expected_chunks = [{"choices": [{"text": text}]} for text in ("a", "b")]
    assert client.served_models() == ["m", "m:1.0", "m:2.0"]
    assert client.complete("m", "x")["choices"][0]["text"] == "v1/completions"
    assert client.chat("m", [{"role": "user", "content": "x"}])["choices"][0]["text"] == "v1/chat/completions"
    assert list(client.chat_stream("m", [])) == expected_chunks
    assert list(client.complete_stream("m", "x")) == expected_chunks
    assert client.embed("m", ["x", "y"]) == [[0.5, 1.0]] * 2
    with pytest.raises(client_errors.ServerError, match="Worker died") as error:
        list(client.complete_stream("m", "x", fails=True))
    assert error.value.reason == "replica_died"


def test_health_operations(make_client: ClientFactory, inference: Any) -> None:
    client = make_client(inference())
    assert client.live()
    assert client.ready()
    assert client.readiness() == {"ready": True, "loading": [], "failed": []}
    starting = make_client(inference(table=RoutingTable(1, {}, startup_complete=False)))
    assert not starting.ready()
    assert starting.readiness()["ready"] is False


def test_management_operations(make_client: ClientFactory, management: Any) -> None:
    server = management()
    for index in range(120):
        server.control_api.put(ModelSpec(f"m{index:03}", "1.0", "m.mar", "", ""))
    client = make_client(None, server)
    assert len(client.models()) == 120, "all pages of them"
    assert "registered" in client.register("new.mar", initial_workers=1, synchronous=True)
    assert client.describe("new")[0]["modelVersion"] == "1.0"
    server.control_api.metadata = {"labels": 3}
    assert client.describe("new", customized=True)[0]["customizedMetadata"] == {"labels": 3}
    assert "customizedMetadata" not in client.describe("new")[0]
    with pytest.raises(ValueError, match="one version"):
        client.describe("new", "all", customized=True)
    assert client.scale("new", min_worker=2, synchronous=True) == "Workers scaled to 2 for model: new"
    client.register("new-2.0.mar", initial_workers=None)
    assert "2.0" in client.set_default("new", "2.0")
    assert "unregistered" in client.unregister("new", "1.0")
    client.set_traffic("new", {"versions": {"2.0": 10000}})
    client.start_rollout("new", {"to": "3.0"})
    client.update_rollout("new", "pause")
    client.delete_experiment("e1")
    operations = [operation[0] for operation in server.control_api.operations]
    assert operations[-4:] == ["set_traffic", "start_rollout", "update_rollout", "delete_experiment"]


def test_rewards_are_accepted_by_either_port(
    make_client: ClientFactory, inference: Any, management: Any
) -> None:
    rewarded = []

    class RewardCounter:
        async def record_rewards(self, id: str, *_: Any) -> dict[str, int]:
            rewarded.append(id)
            return {"counted": 1, "repeated": 0}

    server = management()
    client = make_client(inference(control_api=RewardCounter()), server)
    assert client.reward("e1", {"key": "u", "value": 1}, port="inference") == {"counted": 1, "repeated": 0}
    client.reward("e2", {"key": "u", "value": 1})
    assert rewarded == ["e1"]
    assert [operation[:2] for operation in server.control_api.operations] == [("record_rewards", "e2")]
