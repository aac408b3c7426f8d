"""What streaming adds to a chunk: from the handler's emit to the reader, over a server that runs on this
machine.

    python -m tests.benchmarks.streaming --model-store model_store

registers a model that streams the time, and prints what each way adds; it ends with 1 where that is 1 ms or
more for half of the chunks at one connection. A chunk is made every 5 ms, as a fast language model does.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from serve_app.client import Client
from tests.benchmarks.grpc_load import PREDICTIONS, prediction

MODEL = "chunks"
GOAL = 1.0  # milliseconds a chunk

_HANDLER = Path(__file__).parent / "models" / "chunks.py"
_STAMP = re.compile(rb"(\d{19})")

Read = Callable[[str, int, float], Iterator[float]]  # (address, chunks, pause) -> milliseconds of each


def _over_http(path: str, **headers: str) -> Read:
    def read(address: str, count: int, pause: float) -> Iterator[float]:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
        body = json.dumps({"model": MODEL, "stream": True, "count": count, "pause": pause})
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{path} answers {answer.status}: {answer.read().decode(errors='replace')}")
        while line := answer.readline():
            if found := _STAMP.search(line):
                yield (time.time_ns() - int(found[1])) / 1e6
        connection.close()

    return read


def _over_websocket(address: str, count: int, pause: float) -> Iterator[float]:
    from websockets.sync.client import connect

    with connect(f"ws://{urlsplit(address).netloc}/predictions/{MODEL}", compression=None) as line:
        line.send(json.dumps({"count": count, "pause": pause}))
        while not (piece := str(line.recv())).startswith('{"end"'):
            yield (time.time_ns() - int(piece)) / 1e6


def _over_grpc(address: str, count: int, pause: float) -> Iterator[float]:
    import grpc

    message = prediction(MODEL, body=json.dumps({"count": count, "pause": pause}).encode())
    with grpc.insecure_channel(address) as channel:
        for answer in channel.unary_stream(f"{PREDICTIONS.rpartition('/')[0]}/StreamPredictions")(
            message, timeout=60
        ):
            if found := _STAMP.search(answer):
                yield (time.time_ns() - int(found[1])) / 1e6


GRPC = "gRPC, by the gateway"
WAYS: dict[str, Read] = {
    "pieces": _over_http(f"/predictions/{MODEL}"),
    "server-sent events": _over_http(f"/predictions/{MODEL}", Accept="text/event-stream"),
    "WebSocket": _over_websocket,
    "OpenAI, by the gateway": _over_http("/v1/completions"),
    GRPC: _over_grpc,
}


def measure(address: str, way: str, connections: int, count: int, pause: float = 0.005) -> list[float]:
    """Return the milliseconds of each chunk of concurrent streams, without the first chunk of each."""
    found: list[list[float]] = []

    def stream() -> None:
        found.append(list(WAYS[way](address, count, pause)))

    threads = [threading.Thread(target=stream) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if [len(one) for one in found] != [count] * connections:
        raise SystemExit(
            f"{way}: of {connections} streams of {count} chunks came {[len(one) for one in found]}"
        )
    return [value for one in found for value in one[1:]]


def archive(store: Path) -> Path:
    """Write the model as an archive into ``store``."""
    store.mkdir(parents=True, exist_ok=True)
    manifest = {"model": {"modelName": MODEL, "modelVersion": "1.0", "handler": _HANDLER.name}}
    place = store / f"{MODEL}.mar"
    with zipfile.ZipFile(place, "w") as file:
        file.write(_HANDLER, _HANDLER.name)
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", **manifest}))
    return place


def main(arguments: list[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.streaming", description=__doc__)
    parser.add_argument("--inference", default="http://127.0.0.1:8080")
    parser.add_argument("--grpc", default="127.0.0.1:7070")
    parser.add_argument("--management", default="http://127.0.0.1:8081")
    parser.add_argument("--model-store", type=Path, default=Path("model_store"))
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--chunks", type=int, default=400)
    result = parser.parse_args(arguments)
    client = Client(result.inference, result.management, timeout=120)
    client.register(archive(result.model_store).name, initial_workers=1)
    reached = True
    print("| way | connections | median, ms | 99 % within, ms |\n|---|---|---|---|")
    try:
        for connections in result.connections:
            for way in WAYS:
                values = measure(
                    result.grpc if way == GRPC else result.inference, way, connections, result.chunks
                )
                median, slow = statistics.median(values), statistics.quantiles(values, n=100)[-1]
                print(f"| {way} | {connections} | {median:.2f} | {slow:.2f} |")
                reached = reached and (connections > 1 or median < GOAL)
    finally:
        client.unregister(MODEL)
    print(f"\nStreaming adds less than {GOAL:g} ms to a chunk: {'reached' if reached else 'not reached'}")
    return reached


if __name__ == "__main__":
    sys.exit(not main())
