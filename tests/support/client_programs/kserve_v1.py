"""KServe's InferenceRESTClient, first protocol, against the server whose address is the argument."""

import asyncio
import sys

import httpx
from kserve import InferenceRESTClient, RESTConfig


async def main(base: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v1"))
    assert await client.is_server_live(base)
    assert await client.is_model_ready(base, "twice") is True
    assert await client.is_model_ready(base, "asleep") is False
    request = {"instances": [{"data": 1}, {"data": 2}]}
    assert await client.infer(base, request, "twice") == {"predictions": [2, 4]}
    assert await client.explain(base, "twice", request) == {"explanations": [2, 4]}
    for call in (client.infer(base, request, "missing"), client.is_model_ready(base, "missing")):
        try:
            await call
            raise AssertionError("there is no such model")
        except httpx.HTTPStatusError as error:
            assert "404" in str(error), error
    await client.close()
    print("every call was answered")


asyncio.run(main(sys.argv[1]))
