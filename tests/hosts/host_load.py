"""Requests to each host over each protocol: ``python -m tests.hosts.host_load ADDRESS[:HTTP:GRPC]...``.

The models are those of ``HANDLERS``; the ports are 8080 and 7070 by default.
The load is open: each client starts a request at its next tick whether or not the last one is answered. One
line of JSON per request goes to standard output; the process ends with SIGTERM, once its requests have ended.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import httpx

from serve_app.proto.inference_pb2 import PredictionResponse, PredictionsRequest

HANDLERS = {
    "where": """
import ray
def handle(data, context):
    return None if data is None else [ray.util.get_node_ip_address()] * len(data)
""",
    "slow": """
import time
import ray
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    for number in range(3):
        parts = [f"{number} "] * len(data)
        send_intermediate_predict_response(parts, context.request_ids, "part", 200, context)
        time.sleep(0.1)
    return [ray.util.get_node_ip_address()] * len(data)
""",
}
TIMEOUT_S = 20.0
RATE = 5.0  # requests a second of each protocol to each host
PROTOCOLS = ("http", "stream", "openinference", "grpc")
_PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
_CHANNEL = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
_ROWS = {"inputs": [{"name": "row", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}


class HostClient:
    """Clients of one host; each method returns the address of the replica's host."""

    def __init__(self, target: str) -> None:
        address, http_port, grpc_port = target.split(":") if ":" in target else (target, 8080, 7070)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        timeout = httpx.Timeout(TIMEOUT_S, connect=3)
        self._http = httpx.AsyncClient(
            base_url=f"http://{address}:{http_port}", timeout=timeout, limits=limits
        )
        channel = grpc.aio.insecure_channel(f"{address}:{grpc_port}", options=_CHANNEL)
        self._predictions = channel.unary_unary(
            _PREDICTIONS, PredictionsRequest.SerializeToString, PredictionResponse.FromString
        )

    async def http(self) -> str:
        return (await self._post("/predictions/where", content=b"x")).text

    async def stream(self) -> str:
        return (await self._post("/predictions/slow", content=b"x")).text.split()[-1]

    async def openinference(self) -> str:
        response = await self._post("/v2/models/where/infer", json=_ROWS)
        return str(response.json()["outputs"][0]["data"][0])

    async def grpc(self) -> str:
        request = PredictionsRequest(model_name="where", input={"data": b"x"})
        return (await self._predictions(request, timeout=TIMEOUT_S)).prediction.decode()

    async def _post(self, path: str, **body: Any) -> httpx.Response:
        response = await self._http.post(path, **body)
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {response.text[:200]}")
        return response


async def send(host: str, protocol: str, request: Callable[[], Awaitable[str]]) -> None:
    """Send one request and print its outcome."""
    record = {"host": host, "protocol": protocol, "start": time.monotonic(), "error": "", "replica": ""}
    try:
        record["replica"] = await asyncio.wait_for(request(), TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        record["error"] = f"{error.code().name}: {error.details()}"
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"
    record["end"] = time.monotonic()
    print(json.dumps(record), flush=True)


async def main(targets: list[str]) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    clients = {target: HostClient(target) for target in targets}
    requests: set[asyncio.Task[None]] = set()
    while not stopped.is_set():
        for protocol in PROTOCOLS:
            for target, client in clients.items():
                task = asyncio.create_task(send(target, protocol, getattr(client, protocol)))
                requests.add(task)
                task.add_done_callback(requests.discard)
            await asyncio.sleep(1 / RATE / len(PROTOCOLS))
    await asyncio.gather(*requests)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
