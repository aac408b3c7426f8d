"""KServe's InferenceRESTClient against a server at the argument's address (test_kserve_client.py)."""

import asyncio
import sys

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput


def build_request(array: np.ndarray, binary: bool, outputs: bool = False) -> InferRequest:
    datatypes = {"f4": "FP32", "f2": "FP16", "i8": "INT64", "O": "BYTES"}
    tensor = InferInput("x", list(array.shape), datatypes[array.dtype.str.lstrip("<|")])
    tensor.set_data_from_numpy(array, binary_data=binary)
    requested = [RequestedOutput("x", {"binary_data": binary})] if outputs else None
    return InferRequest("identity", [tensor], request_id="7", request_outputs=requested)


async def main(base: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(base)
    assert await client.is_server_ready(base)
    assert await client.is_model_ready(base, "identity")
    assert not await client.is_model_ready(base, "asleep")
    ramp = np.arange(6).reshape(2, 3)
    for binary in (True, False):
        for array in (ramp.astype(np.float32), ramp, np.array([["é".encode(), b""]], object)):
            for outputs in (True, False):
                response = await client.infer(base, build_request(array, binary, outputs), "identity")
                [output] = response.outputs
                assert (response.id, output.name, output.shape) == ("7", "x", list(array.shape))
                result = output.as_numpy()
                texts = [x.encode() if isinstance(x, str) else x for x in result.reshape(-1).tolist()]
                assert texts == array.reshape(-1).tolist(), (result, array)
    half = ramp.astype(np.float16)
    [output] = (await client.infer(base, build_request(half, True, True), "identity")).outputs
    np.testing.assert_array_equal(output.as_numpy(), half)
    try:
        await client.infer(base, build_request(ramp, True), "missing")
        raise AssertionError("there is no such model")
    except httpx.HTTPStatusError as error:
        assert "Model not found: missing, '404" in str(error), error
    await client.close()
    print("every call was answered")


asyncio.run(main(sys.argv[1]))
