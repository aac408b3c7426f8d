"""KServe's InferenceGRPCClient against a server whose address is the argument, started by test_grpc.py."""

import asyncio
import sys

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest


def build_request(array: np.ndarray, model: str, raw: bool) -> InferRequest:
    tensor = InferInput("x", list(array.shape), {"f": "FP32", "i": "INT64"}[array.dtype.kind])
    tensor.set_data_from_numpy(array, binary_data=raw)
    return InferRequest(model, [tensor], request_id="7")


async def main(address: str) -> None:
    async with InferenceGRPCClient(address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("identity")
        assert not await client.is_model_ready("asleep")
        for raw in (True, False):
            for array in (np.arange(6).reshape(2, 3), np.arange(6, dtype=np.float32)):
                response = await client.infer(build_request(array, "identity", raw))
                [output] = response.outputs
                assert (response.id, output.name) == ("7", "x")
                np.testing.assert_array_equal(output.as_numpy(), array)
        try:
            await client.infer(build_request(np.arange(2), "missing", True))
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.NOT_FOUND, error
            assert error.details() == "Model not found: missing", error
        else:
            raise AssertionError("there is no such model")
    print("every call was answered")


asyncio.run(main(sys.argv[1]))
