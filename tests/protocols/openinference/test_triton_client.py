"""NVIDIA's HTTP client with its default binary transport."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from serve_app.domain.model import ModelRef
from serve_app.domain.response_cache import CachePolicy

pytestmark = pytest.mark.integration


SIMPLE = {
    "inputs": [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16]} for i in (0, 1)],
    "outputs": [{"name": f"OUTPUT{i}", "datatype": "INT32", "shape": [1, 16]} for i in (0, 1)],
}
DATATYPES = {
    "BOOL": np.bool_,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    **{
        f"{kind.upper()}{bits}": np.dtype(f"{kind}{bits}")
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}


class Client(triton.InferenceServerClient):
    """A client that is closed explicitly, because its finalizer must not run in another thread."""

    def __del__(self) -> None:
        pass


def simple(data: list, context: Any) -> list:
    return [{"OUTPUT0": r["INPUT0"] + r["INPUT1"], "OUTPUT1": r["INPUT0"] - r["INPUT1"]} for r in data]


def identity(data: list, context: Any) -> list:
    return [dict(row) for row in data]


@pytest.fixture
def client(models: Any, listening: Any) -> Iterator[Client]:
    models.add("simple", simple, form="arrays", ports=SIMPLE)
    models.add("identity", identity, form="arrays")
    models.add("text", lambda data, context: [bytes(row["data"]).upper() for row in data])
    with listening(models.app()) as address, Client(address) as client:
        yield client


def inputs(binary: bool = True, **arrays: np.ndarray) -> list[triton.InferInput]:
    tensors = []
    for name, array in arrays.items():
        datatype = (
            "BYTES" if array.dtype == object else {np.dtype(t): n for n, t in DATATYPES.items()}[array.dtype]
        )
        tensor = triton.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array, binary_data=binary)
        tensors.append(tensor)
    return tensors


ONES, RAMP = np.ones((1, 16), np.int32), np.arange(16, dtype=np.int32).reshape(1, 16)


@pytest.mark.parametrize("binary", [True, False])
def test_named_outputs_are_returned_in_order(client: Client, binary: bool) -> None:
    requested = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("OUTPUT1", "OUTPUT0")]
    result = client.infer(
        "simple", inputs(binary, INPUT0=RAMP, INPUT1=ONES), outputs=requested, request_id="7"
    )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), RAMP + 1)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), RAMP - 1)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("7", "simple", "1.0")
    assert [output["name"] for output in response["outputs"]] == ["OUTPUT1", "OUTPUT0"]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_requests_and_responses(client: Client, coding: str) -> None:
    array = np.arange(100_000, dtype=np.int32)
    options = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    np.testing.assert_array_equal(client.infer("identity", inputs(x=array), **options).as_numpy("x"), array)


def test_all_outputs_are_returned_by_default(client: Client) -> None:
    result = client.infer("simple", inputs(INPUT0=RAMP, INPUT1=ONES), model_version="1.0")
    assert {output["name"] for output in result.get_response()["outputs"]} == {"OUTPUT0", "OUTPUT1"}
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), RAMP + 1)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_survives_a_round_trip(client: Client, datatype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(DATATYPES[datatype])
    for binary in (True, False) if datatype != "FP16" else (True,):
        requested = [triton.InferRequestedOutput("x", binary_data=binary)]
        result = client.infer("identity", inputs(binary, x=array), outputs=requested).as_numpy("x")
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(result, array)


def test_texts_and_bytes_survive_a_round_trip(client: Client) -> None:
    texts = np.array([["é".encode(), b""], [b"b", b"c"]], object)
    for binary in (True, False):
        requested = [triton.InferRequestedOutput("x", binary_data=binary)]
        result = client.infer("identity", inputs(binary, x=texts), outputs=requested).as_numpy("x")
        assert [item if isinstance(item, bytes) else item.encode() for item in result.reshape(-1)] == list(
            texts.flat
        )
    raw = np.array([b"\x00\xff"], object)
    assert client.infer("identity", inputs(x=raw)).as_numpy("x").tolist() == [b"\x00\xff"]


def test_handlers_without_tensors_can_be_called(client: Client) -> None:
    result = client.infer("text", inputs(TEXT=np.array([b"shout"], object)))
    assert result.as_numpy("output-0").tolist() == [b"SHOUT"]


def test_classification_returns_the_highest_values(client: Client) -> None:
    requested = [triton.InferRequestedOutput("x", class_count=1)]
    scores = np.array([[0.25, 0.5], [2, 1]], np.float32)
    assert client.infer("identity", inputs(x=scores), outputs=requested).as_numpy("x").reshape(
        -1
    ).tolist() == [
        b"0.500000:1",
        b"2.000000:0",
    ]


def test_invalid_requests_are_rejected_with_a_reason(client: Client) -> None:
    cases = [
        (inputs(INPUT0=RAMP), "INPUT1 is missing"),
        (inputs(INPUT0=RAMP, INPUT1=ONES.astype(np.int64)), "INPUT1 is INT64"),
        (inputs(INPUT0=RAMP, INPUT1=ONES[:, :8]), "INPUT1 is INT32 [1, 8]"),
    ]
    for request_inputs, message in cases:
        with pytest.raises(InferenceServerException) as raised:
            client.infer("simple", request_inputs)
        assert message in raised.value.message()
        assert raised.value.status() == "400"
    with pytest.raises(InferenceServerException, match="Model not found: missing"):
        client.infer("missing", inputs(x=ONES))
    with pytest.raises(InferenceServerException, match="version: 9 does not exist"):
        client.infer("simple", inputs(x=ONES), model_version="9")
    with pytest.raises(InferenceServerException, match="no output 'z'"):
        client.infer("identity", inputs(x=ONES), outputs=[triton.InferRequestedOutput("z")])


def test_health_metadata_and_configuration(client: Client) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert client.is_model_ready("simple", "1.0")
    assert not client.is_model_ready("missing")
    server = client.get_server_metadata()
    assert server["name"] == "torchrelay"
    assert "binary_tensor_data" in server["extensions"]
    statistics = client.get_model_metadata("simple")
    assert statistics == {"name": "simple", "versions": ["1.0"], "platform": "torchrelay", **SIMPLE}
    config = client.get_model_config("simple", "1.0")
    assert config["max_batch_size"] == 0
    assert config["input"][0] == {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [1, 16]}


def test_models_are_loaded_and_unloaded(client: Client, models: Any) -> None:
    client.unload_model("simple")
    assert not client.is_model_ready("simple")
    states = {row["name"]: (row["state"], row["reason"]) for row in client.get_model_repository_index()}
    assert states["simple"] == ("UNAVAILABLE", "unloaded")
    assert states["identity"] == ("READY", "")
    client.load_model("simple")
    assert client.is_model_ready("simple")
    client.load_model("fresh")
    assert client.is_model_ready("fresh")
    assert models.operations == [
        ("scale", "simple", "1.0", 0, 0, True),
        ("scale", "simple", None, 1, 1, True),
        ("register", "fresh.mar", "fresh", 1),
    ]
    with pytest.raises(InferenceServerException, match="config"):
        client.load_model("simple", config='{"max_batch_size": 1}')
    with pytest.raises(InferenceServerException, match="Model not found"):
        client.unload_model("missing")


def test_statistics_count_batches_by_size(models: Any, client: Client) -> None:
    client.infer("simple", inputs(INPUT0=RAMP, INPUT1=ONES))
    assert client.get_inference_statistics("simple")["model_stats"][0]["last_inference"] == 0
    for rows in (4, 1, 4):
        models.meters.batch("simple", "1.0", rows, 0.25, [0.0] * rows)
    [statistics] = client.get_inference_statistics("simple")["model_stats"]
    sizes = {batch["batch_size"]: batch["compute_infer"] for batch in statistics["batch_stats"]}
    assert sizes == {1: {"count": 1, "ns": 250_000_000}, 4: {"count": 2, "ns": 500_000_000}}
    assert (statistics["inference_count"], statistics["execution_count"]) == (9, 3)
    assert abs(statistics["last_inference"] - time.time() * 1000) < 60_000


def test_statistics_count_successes_and_failures(client: Client) -> None:
    client.infer("simple", inputs(INPUT0=RAMP, INPUT1=ONES))
    with pytest.raises(InferenceServerException):
        client.infer("simple", inputs(INPUT0=RAMP))
    client.infer("identity", inputs(x=ONES))
    [statistics] = client.get_inference_statistics("simple")["model_stats"]
    assert (statistics["name"], statistics["version"]) == ("simple", "1.0")
    assert statistics["inference_stats"]["success"]["count"] == 1
    assert statistics["inference_stats"]["success"]["ns"] > 0
    assert statistics["inference_stats"]["fail"]["count"] == 1
    assert {row["name"] for row in client.get_inference_statistics()["model_stats"]} == {"simple", "identity"}
    with pytest.raises(InferenceServerException, match="Model not found"):
        client.get_inference_statistics("missing")


def test_concurrent_requests_get_their_own_responses(client: Client, models: Any, listening: Any) -> None:
    with listening(models.app()) as address, Client(address, concurrency=4) as concurrent_client:
        pending = [
            concurrent_client.async_infer("identity", inputs(x=np.full((n, 2), n, np.float32)))
            for n in range(1, 9)
        ]
        for n, request in enumerate(pending, 1):
            np.testing.assert_array_equal(request.get_result().as_numpy("x"), np.full((n, 2), n))


def test_statistics_count_requests_of_the_response_cache(models: Any, client: Client) -> None:
    route = models.reader.table.models["identity"].versions["1.0"]
    models.put(ModelRef("identity", "1.0"), replace(route, response_cache=CachePolicy()))
    answers = [client.infer("identity", inputs(x=ONES)).as_numpy("x") for _ in range(3)]
    assert all((answer == ONES).all() for answer in answers)
    [statistics] = client.get_inference_statistics("identity")["model_stats"]
    stats = statistics["inference_stats"]
    assert (stats["cache_hit"]["count"], stats["cache_miss"]["count"]) == (2, 1)
    assert stats["success"]["count"] == 3
