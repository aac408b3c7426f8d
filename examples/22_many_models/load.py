"""Send requests to all models of the pool, a few of them often, and print what the server did."""

import argparse
import asyncio
import os
import random
import time
from collections import Counter

import httpx
from prometheus_client.parser import text_string_to_metric_families

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
METRICS = os.environ.get("TORCHRELAY_METRICS", "http://127.0.0.1:8082")


def list_models() -> list[str]:
    names, token = [], "0"
    while token:
        page = httpx.get(f"{MANAGEMENT}/models", params={"limit": 100, "next_page_token": token}).json()
        names += [model["modelName"] for model in page["models"]]
        token = page.get("nextPageToken", "")
    return [name for name in names if name.startswith("small")]


def read_metrics() -> dict[str, float]:
    text = httpx.get(f"{METRICS}/metrics", timeout=60).text
    values: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("pool") == "small":
                values[sample.name] += sample.value
    return values


async def send(names: list[str], seconds: float, results: Counter) -> None:
    """Send requests one after another; the model of rank r gets 1/r of those of the first."""
    draw, weights = random.Random(), [1 / rank for rank in range(1, len(names) + 1)]
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=INFERENCE, timeout=60) as client:
        while time.monotonic() < end:
            [name] = draw.choices(names, weights)
            response = await client.post(f"/predictions/{name}", json=[draw.random() for _ in range(64)])
            right = response.status_code == 200 and response.json()["model"] == name
            results["answered" if right else "failed"] += 1
            results["loaded first"] += right and response.json()["first"]


async def main(seconds: float) -> None:
    names = random.Random(0).sample(models := list_models(), len(models))
    print(f"{len(names)} models are registered")
    if not names:
        raise SystemExit("Register them first: torchrelay models register-all model_store/many")
    before, results = read_metrics(), Counter()
    await asyncio.gather(*(send(names, seconds, results) for _ in range(8)))
    after = read_metrics()
    evicted = after["torchrelay_pool_evictions_total"] - before.get("torchrelay_pool_evictions_total", 0)
    print(f"{results['answered']} requests were answered, {results['failed']} failed")
    print(f"{results['loaded first']} of them waited for the load of their model; {evicted:.0f} were evicted")
    print(
        f"{after['torchrelay_pool_loaded_versions']:.0f} models are loaded in "
        f"{after['torchrelay_pool_memory_bytes'] / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    asyncio.run(main(parser.parse_args().seconds))
