"""Send concurrent requests and print the sizes of the server's batches."""

import argparse
import asyncio
import os
import time
from collections import Counter
from contextlib import suppress

import httpx
from prometheus_client.parser import text_string_to_metric_families
from sklearn.datasets import load_digits
from torchrelay import AsyncClient, ConflictError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
METRICS = os.environ.get("TORCHRELAY_METRICS", "http://127.0.0.1:8082")


async def count_batches(client: AsyncClient) -> Counter[float]:
    """Return the cumulative number of batches by size, from the buckets of the histogram."""
    return Counter(
        {
            float(sample.labels["le"]): sample.value
            for family in text_string_to_metric_families(await client.metrics())
            for sample in family.samples
            if sample.name == "torchrelay_batch_size_bucket" and sample.labels["model"] == "mlp"
        }
    )


async def send(http: httpx.AsyncClient, connections: int, requests: int) -> tuple[float, float]:
    """Send all requests; return their duration in seconds and the share of correct answers."""
    digits = load_digits()
    numbers = iter(range(requests))
    correct = 0

    async def connection() -> None:
        nonlocal correct
        for number in numbers:
            row = number % len(digits.data)
            answer = await http.post(f"{INFERENCE}/predictions/mlp", json=digits.data[row].tolist())
            correct += answer.raise_for_status().json()["digit"] == digits.target[row]

    start = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(connections)))
    return time.perf_counter() - start, correct / requests


async def main(connections: int, requests: int) -> None:
    limits = httpx.Limits(max_connections=connections)
    async with (
        AsyncClient(management=MANAGEMENT, metrics=METRICS) as client,
        httpx.AsyncClient(limits=limits, timeout=30) as http,
    ):
        with suppress(ConflictError):  # it is registered already
            await client.register("mlp.mar", initial_workers=1)
        before = await count_batches(client)
        seconds, accuracy = await send(http, connections, requests)
        after = await count_batches(client)
    print(f"{requests} requests over {connections} connections in {seconds:.1f} s; {accuracy:.1%} right")
    previous_size = previous_count = 0
    for size, count in sorted(after.items()):
        cumulative = count - before[size]
        if cumulative > previous_count:
            rows = f"{previous_size + 1:g} to {size:g}" if size > previous_size + 1 else f"{size:g}"
            print(f"{cumulative - previous_count:6g} batches of {rows}")
        previous_size, previous_count = size, max(previous_count, cumulative)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.connections, arguments.requests))
