"""Run an A/B test of two versions by their click rates, analysed while it runs, and an A/A test."""

import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from torchrelay import Client, ConflictError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
EXPERIMENT = json.loads(Path(__file__).with_name("experiment.json").read_text())
SHARES = (0.40, 0.25, 0.15, 0.10, 0.10)  # of the readers, by their favourite topic
LOYALTY = 0.4  # probability to read the favourite topic rather than a random one
FAVOURITE_CLICK_RATE, OTHER_CLICK_RATE = 1 / 3, 1 / 9
READERS_PER_LOOK = 250
MAX_LOOKS = 40  # the test ends without a result after so many


class Reader:
    """A simulated reader with a favourite topic that the models do not know."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._random = random.Random(name)
        self._favourite = self._random_topic()
        self.history = [
            self._favourite if self._random.random() < LOYALTY else self._random_topic() for _ in range(3)
        ]

    def _random_topic(self) -> int:
        return self._random.choices(range(len(SHARES)), SHARES)[0]

    def clicks(self, topic: int) -> bool:
        return self._random.random() < (
            FAVOURITE_CLICK_RATE if topic == self._favourite else OTHER_CLICK_RATE
        )


def register(client: Client, url: str) -> None:
    try:
        status = client.register(url, initial_workers=1)
    except ConflictError:
        status = "already registered"
    print(f"POST /models?url={url}: {status}")


@contextmanager
def experiment(client: Client, document: dict) -> Iterator[str]:
    """Run an experiment and yield its id: readers are assigned evenly and keep their version."""
    started = client.start_experiment("headlines", document)
    print(f"\nPOST /models/headlines/experiments: {started['id']}, {started['name']!r}, has begun")
    try:
        yield started["id"]
    finally:
        stopped = client.stop_experiment(started["id"])
        print(f"DELETE /experiments/{stopped['id']}: {stopped['state']}")


class Visit:
    """A visit: ``version`` recommended a topic, and ``clicked`` is whether the reader opened it."""

    def __init__(self, client: Client, reader: Reader) -> None:
        body = json.dumps({"history": reader.history})
        answer = client.request("headlines", body, "application/json", headers={"x-user": reader.name})
        self.reader = reader
        self.request_id = answer.request_id
        self.version = answer.version
        self.clicked = reader.clicks(answer.json()["topic"])


def show(report: dict) -> None:
    """Print every arm's means with confidence intervals that hold at every look."""
    print(f"{'arm':<10}{'version':<9}{'readers':>7}", *(f"{metric:>26}" for metric in report["metrics"]))
    for name, arm in report["arms"].items():
        figures = []
        for metric in report["metrics"].values():
            arm_metric = metric["arms"][name]
            interval = ""
            if arm_metric["low"] is not None:
                interval = f" [{arm_metric['low']:.3f}, {arm_metric['high']:.3f}]"
            figures.append(f"{arm_metric['mean']:.3f}{interval}")
        print(f"{name:<10}{arm['version']:<9}{arm['units']:>7,}", *(f"{figure:>26}" for figure in figures))
    for metric in report["metrics"].values():
        for difference in metric["differences"].values():
            print(difference["sentence"])
    print(report["sample_ratio"]["sentence"])
    print(report["sentence"])


def compare(client: Client, pool: ThreadPoolExecutor, id: str) -> None:
    """Compare popular with personal headlines until one of them is significantly better."""
    assigned: dict[str, str] = {}
    for number in range(1, MAX_LOOKS + 1):
        readers = [Reader(f"reader-{number}-{i}") for i in range(READERS_PER_LOOK)]
        visits = list(pool.map(lambda reader: Visit(client, reader), readers))
        assigned |= {visit.reader.name: visit.version for visit in visits}
        # A visit without an event counts as 0.
        events = [{"request_id": visit.request_id, "value": 1} for visit in visits if visit.clicked]
        counted = client.reward(id, *events)
        if number == 1:
            print(f"POST /experiments/{id}/events: {counted}")
            print(f"the same again: {client.reward(id, *events)}")
        clicks = client.experiment(id)["metrics"]["clicks"]
        means = ", ".join(f"{arm} {metric['mean']:.3f}" for arm, metric in clicks["arms"].items())
        verdict = clicks["differences"]["personal"]["verdict"]
        print(f"{number * READERS_PER_LOOK:>6,} readers: clicks {means}: {verdict.replace('_', ' ')}")
        if verdict in ("better", "worse"):
            break
    again = random.Random(0).sample(sorted(assigned), 50)
    same = sum(Visit(client, Reader(name)).version == assigned[name] for name in again)
    print(f"{same} of {len(again)} readers who came again were given the version that they had")
    show(client.experiment(id))


def compare_with_itself(client: Client, pool: ThreadPoolExecutor, id: str) -> None:
    """Compare a version with itself: no look may report a significant difference."""
    for looks in range(8):
        readers = [Reader(f"someone-{looks}-{i}") for i in range(READERS_PER_LOOK)]
        visits = pool.map(lambda reader: Visit(client, reader), readers)
        # An event may name the key instead of the request: it counts for that reader's version.
        client.reward(id, *({"key": visit.reader.name, "value": 1} for visit in visits if visit.clicked))
        clicks = client.experiment(id)["metrics"]["clicks"]["differences"]["other"]
        if clicks["verdict"] in ("better", "worse"):
            print(f"after {(looks + 1) * READERS_PER_LOOK:,} readers a difference was seen that is not there")
            break
    else:
        print(f"looked at {looks + 1} times: no difference was taken for one")
    print(clicks["sentence"])


if __name__ == "__main__":
    with Client(INFERENCE, MANAGEMENT) as client, ThreadPoolExecutor(8) as pool:
        register(client, "headlines-1.mar")
        register(client, "headlines-2.mar")
        with experiment(client, EXPERIMENT) as id:
            compare(client, pool, id)
        arms = {arm: {"version": "2.0", "weight": 5000} for arm in ("one", "other")}
        with experiment(
            client, {**EXPERIMENT, "name": "A/A", "salt": "A/A", "arms": arms, "baseline": "one"}
        ) as id:
            compare_with_itself(client, pool, id)
