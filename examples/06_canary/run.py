"""Roll out a version that fails one request in ten, then one that works, under steady load.

The first is rolled back automatically, the second is promoted. Exits with 1 otherwise, and if a request fails
that the bad version did not receive.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from contextlib import suppress

import httpx
from torchrelay import AsyncClient, ConflictError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
MODEL = "estimate"
DISTRICTS = [
    "castle",
    "harbour",
    "hill",
    "market",
    "meadow",
    "mill",
    "old town",
    "orchard",
    "station",
    "university",
]


class Load:
    """Connections that send requests at a constant rate and count the responses by version and status."""

    def __init__(self, connections: int, rate: float) -> None:
        self.answers: Counter[tuple[str, int | str]] = Counter()
        self._interval = connections / rate
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.AsyncClient(base_url=INFERENCE, limits=limits, timeout=30)
        self._tasks = [asyncio.create_task(self._connection()) for _ in range(connections)]

    async def _connection(self) -> None:
        await asyncio.sleep(random.uniform(0, self._interval))
        while True:
            due = time.monotonic() + self._interval
            flat = {"district": random.choice(DISTRICTS), "area": random.randint(25, 160)}
            try:
                answer = await self._client.post(f"/predictions/{MODEL}", json=flat)
                self.answers[answer.headers.get("x-model-version", "no version"), answer.status_code] += 1
            except httpx.HTTPError as error:
                self.answers["no version", type(error).__name__] += 1
            await asyncio.sleep(due - time.monotonic())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    def failed(self, version: str | None = None) -> int:
        """Return how many requests of one version, or of all, failed."""
        return sum(
            count
            for (answered_by, status), count in self.answers.items()
            if status != 200 and version in (None, answered_by)
        )

    def __str__(self) -> str:
        return ", ".join(
            f"{version} {status}: {n:,}" for (version, status), n in sorted(self.answers.items(), key=str)
        )


async def prepare(client: AsyncClient) -> None:
    """Register all versions: 1.0 is the default, the others have no workers."""
    for version, workers in (("1.0", 1), ("2.0", 0), ("3.0", 0)):
        with suppress(ConflictError):  # it is registered already
            await client.register(f"{MODEL}-{version}.mar", initial_workers=workers)
    await client.scale(MODEL, "1.0", min_worker=1, synchronous=True)
    await client.set_default(MODEL, "1.0")
    for version in ("2.0", "3.0"):
        await client.scale(MODEL, version, min_worker=0, synchronous=True)


async def roll_out(client: AsyncClient, plan: dict) -> dict:
    """Start a rollout, print its decisions, and return its final state."""
    print(f"\nPOST /models/{MODEL}/rollout {plan}")
    rollout = await client.start_rollout(MODEL, plan)
    shown = 0
    while True:
        for decision in rollout["decisions"][shown:]:
            seconds = decision["time"] - rollout["started_at"]
            verdict = f"{decision['verdict']:<11} {decision['percent']:g} %"
            print(f"  {seconds:5.1f} s  {verdict}: {decision['reason']}")
        shown = len(rollout["decisions"])
        if rollout["state"] not in ("starting", "running", "paused"):
            return rollout
        await asyncio.sleep(0.2)
        rollout = await client.rollout(MODEL)


async def main(options: argparse.Namespace) -> bool:
    plan = {
        "steps": options.steps,
        "bake_s": options.bake,
        "min_calls": options.min_calls,
        "guardrails": {"error_rate": 0.01, "p99": options.p99},
        "keep_warm_s": options.keep_warm,
    }
    failures: list[str] = []

    def check(passed: bool, statement: str) -> None:
        print(f"  {'yes' if passed else 'NO '}  {statement}")
        if not passed:
            failures.append(statement)

    async with AsyncClient(management=MANAGEMENT) as client:
        await prepare(client)
        load = Load(options.connections, options.rate)
        try:
            await asyncio.sleep(1)
            rolled_back = await roll_out(client, {"to": "2.0", **plan})
            await asyncio.sleep(0.5)  # for the running requests
            failed, failed_by_new = load.failed(), load.failed("2.0")
            print(f"  answers by version and status: {load}")
            check(rolled_back["state"] == "rolled_back", "2.0 went back by itself")
            for reading in rolled_back["decisions"][-1]["figures"].get("guardrails", []):
                print(f"       {reading['words']}")
            check(failed_by_new > 0, f"2.0 failed {failed_by_new:,} requests")
            check(failed == failed_by_new, "no call failed but these")

            promoted = await roll_out(client, {"to": "3.0", **plan})
            await asyncio.sleep(0.5)
            before = load.answers.copy()
            await asyncio.sleep(1)
            print(f"  answers by version and status: {load}")
            check(promoted["state"] == "promoted", "3.0 took over")
            check(load.failed() == failed, "no call has failed since 2.0 went back")
            check({version for version, _ in load.answers - before} == {"3.0"}, "3.0 answers every call")
        finally:
            await load.close()
    return not failures


def parse_percents(text: str) -> list[float]:
    return [float(step) for step in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument(
        "--rate", type=float, default=400, help="requests a second, of all connections together"
    )
    parser.add_argument("--steps", type=parse_percents, default=[1, 5, 25, 50, 100])
    parser.add_argument("--bake", type=float, default=10, help="seconds for which each step holds")
    parser.add_argument("--min-calls", type=int, default=20)
    # All processes share one machine's processors, so the latency limit needs some tolerance.
    parser.add_argument("--p99", type=float, default=5.0, help="how many times that of 1.0 it may be")
    parser.add_argument("--keep-warm", type=float, default=60, help="seconds for which 1.0 keeps its workers")
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(not asyncio.run(main(parser.parse_args())))
