"""Every user call of NVIDIA's gRPC client, in a separate process because its messages have our names."""

from __future__ import annotations

import queue
import sys
from functools import partial

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def inputs(**arrays: np.ndarray) -> list[triton.InferInput]:
    tensors = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, list(array.shape), "BYTES" if array.dtype == object else "INT32")
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def main(address: str) -> None:
    client = triton.InferenceServerClient(address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert client.get_server_metadata().name == "torchrelay"
    assert client.get_model_metadata("simple").inputs[0].datatype == "INT32"
    assert client.get_model_config("simple").config.input[0].data_type == 8  # TYPE_INT32
    assert "simple" in [model.name for model in client.get_model_repository_index().models]

    ones, ramp = np.ones((1, 16), np.int32), np.arange(16, dtype=np.int32).reshape(1, 16)
    both = inputs(INPUT0=ones, INPUT1=ramp)
    response = client.infer("simple", both, request_id="7")
    assert response.get_response().id == "7"
    np.testing.assert_array_equal(response.as_numpy("OUTPUT0"), ones + ramp)
    requested = [triton.InferRequestedOutput("OUTPUT1")]
    response = client.infer(
        "simple", both, model_version="1.0", outputs=requested, priority=1, timeout=10_000_000
    )
    np.testing.assert_array_equal(response.as_numpy("OUTPUT1"), ones - ramp)
    assert response.as_numpy("OUTPUT0") is None

    words = np.array(["a", "wörd", ""], dtype=object)
    result = client.infer("identity", inputs(text=words)).as_numpy("text")
    assert [element.decode() for element in result] == list(words)

    responses: queue.Queue = queue.Queue()
    client.start_stream(partial(lambda results, result, error: results.put((result, error)), responses))
    for number in ("1", "2"):
        client.async_stream_infer("simple", both, request_id=number)
    client.async_stream_infer("missing", both, request_id="3")
    received = [responses.get(timeout=60) for _ in range(3)]
    client.stop_stream()
    assert [result.get_response().id for result, error in received[:2]] == ["1", "2"]
    assert "Model not found: missing" in str(received[2][1])

    results: queue.Queue = queue.Queue()
    client.async_infer("simple", both, lambda result, error: results.put((result, error)))
    result, error = results.get(timeout=60)
    assert error is None
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ones + ramp)

    assert client.get_inference_statistics("simple").model_stats[0].inference_stats.success.count >= 4
    client.load_model("asleep")
    assert client.is_model_ready("asleep")
    client.unload_model("asleep")
    assert not client.is_model_ready("asleep")
    for model, part in (("missing", "Model not found"), ("simple", "is missing")):
        try:
            client.infer(model, both[:1])
        except InferenceServerException as error:
            assert part in str(error)
        else:
            raise AssertionError(model)
    client.close()
    print("every call was answered")


if __name__ == "__main__":
    main(sys.argv[1])
