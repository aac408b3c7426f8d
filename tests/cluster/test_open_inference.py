"""The Open Inference Protocol on a real cluster: at the replica itself, and through the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from tests.support.archives import make_archive
from tests.support.server import Server

pytestmark = pytest.mark.cluster

SUMS = """
import numpy as np


def handle(data, context):
    if data is None:
        return None
    sizes = [len(row["x"]) for row in data]
    total = np.concatenate([row["x"] for row in data]).sum(axis=1)
    return [{"y": part} for part in np.split(total, np.cumsum(sizes)[:-1])]
"""
SIGNED = {
    "tensors": True,
    "batchSize": 8,
    "signature": {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}],
    },
}


class Client(triton.InferenceServerClient):
    """Closed by hand: its own end, in whatever thread collects it, is not for threads."""

    def __del__(self) -> None:
        pass


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url.removeprefix("http://"), concurrency=8, network_timeout=60) as client:
        yield client


def given(array: np.ndarray, name: str = "x") -> list[triton.InferInput]:
    tensor = triton.InferInput(name, list(array.shape), {"f": "FP32", "i": "INT64"}[array.dtype.kind])
    tensor.set_data_from_numpy(array)
    return [tensor]


def doubling() -> bytes:
    put = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [put], [out])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    ).SerializeToString()


def test_an_onnx_graph_at_its_replica(server: Server, client: Client, tmp_path: Path) -> None:
    archive = make_archive(
        *(tmp_path, "graph", ""),
        files={"model.onnx": doubling()},
        config={"fast_path": "oip", "batchSize": 8},
        manifest={"handler": "onnx", "serializedFile": "model.onnx"},
    )
    answer = server.register(archive)
    assert answer.status_code == 200, answer.text
    routes = "/-/routes"
    server.wait(
        lambda: server.http.get(routes).json()["/v2/models/graph"] == "graph--1.0",
        description="the replica's route",
    )
    ports = [{"name": name, "datatype": "FP32", "shape": [-1, 3]} for name in "xy"]
    reported = server.wait(
        lambda: (result := client.get_model_metadata("graph"))["inputs"] and result,
        description="the signature",
    )
    assert (reported["inputs"], reported["outputs"]) == (ports[:1], ports[1:])
    sent = [np.full((rows, 3), rows, np.float32) for rows in (1, 4, 2, 8, 1, 3)]
    begun = [client.async_infer("graph", given(array)) for array in sent]  # they meet in batches
    for array, requested in zip(sent, begun):
        np.testing.assert_array_equal(requested.get_result().as_numpy("y"), array * 2)
    with pytest.raises(InferenceServerException, match=r"x is FP32 \[1, 2\], and is to be FP32 \[-1, 3\]"):
        client.infer("graph", given(np.zeros((1, 2), np.float32)))
    assert server.http.post("/predictions/graph", json=[1, 2, 3]).json() == [2.0, 4.0, 6.0]

    def count_all() -> dict[str, Any] | None:
        """Return the statistics; samples of a slow process are in the next ones."""
        [counted] = client.get_inference_statistics("graph", "1.0")["model_stats"]
        return counted if counted["inference_stats"]["success"]["count"] == 7 else None

    counted = server.wait(count_all, description="the statistics of seven requests")
    sizes = {one["batch_size"]: one["compute_infer"]["count"] for one in counted["batch_stats"]}
    assert sum(size * count for size, count in sizes.items()) == counted["inference_count"]
    assert abs(counted["last_inference"] / 1000 - time.time()) < 60
    client.unload_model("graph")


def test_a_model_of_tensors_through_the_gateway(server: Server, client: Client, tmp_path: Path) -> None:
    answer = server.register(make_archive(tmp_path, "sums", SUMS, config=SIGNED))
    assert answer.status_code == 200, answer.text
    assert client.get_model_metadata("sums")["inputs"] == SIGNED["signature"]["inputs"]
    sent = [np.full((rows, 2), rows, np.float32) for rows in (1, 4, 2, 8, 1, 3)]
    for array, requested in zip(sent, [client.async_infer("sums", given(array)) for array in sent]):
        np.testing.assert_array_equal(requested.get_result().as_numpy("y"), array.sum(axis=1))
    assert server.http.post("/predictions/sums", json={"x": [[1, 2]]}).json() == {"y": [3.0]}
    refused = server.http.post("/predictions/sums", json={"x": [[1, 2, 3]]})
    assert (refused.status_code, "FP32 [1, 3]" in refused.json()["message"]) == (400, True)
    client.unload_model("sums")
    assert not client.is_model_ready("sums")
    client.load_model("sums")
    assert client.infer("sums", given(sent[0])).as_numpy("y").tolist() == [2.0]
    client.unload_model("sums")
