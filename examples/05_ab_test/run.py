"""An A/B test of two versions by what readers click, looked at as it goes on, and an A/A test for comparison."""

import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from serve_app.client import Client, Conflict

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
EXPERIMENT = json.loads(Path(__file__).with_name("experiment.json").read_text())
SHARES = (0.40, 0.25, 0.15, 0.10, 0.10)  # of the readers, by their favourite topic
FAITHFUL = 0.4  # how often somebody reads the favourite topic, and not what everybody reads
CLICKS, RARELY = 1 / 3, 1 / 9  # how often a reader clicks on the favourite topic, and on any other
TOGETHER = 250  # readers between two looks
PATIENCE = 40  # looks, after which nothing more is expected


class Reader:
    """Somebody with a favourite topic that nobody but the simulation knows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._chance = random.Random(name)
        self._favourite = self._any()
        self.history = [self._favourite if self._chance.random() < FAITHFUL else self._any() for _ in range(3)]

    def _any(self) -> int:
        return self._chance.choices(range(len(SHARES)), SHARES)[0]

    def clicks(self, topic: int) -> bool:
        return self._chance.random() < (CLICKS if topic == self._favourite else RARELY)


def register(client: Client, url: str) -> None:
    try:
        said = client.register(url, initial_workers=1)
    except Conflict:
        said = "already registered"
    print(f"POST /models?url={url}: {said}")


@contextmanager
def experiment(client: Client, document: dict) -> Iterator[str]:
    """An experiment that deals readers out evenly, each of whom stays with what they were given, and ends; its id."""
    said = client.begin_experiment("headlines", document)
    print(f"\nPOST /models/headlines/experiments: {said['id']}, {said['name']!r}, has begun")
    try:
        yield said["id"]
    finally:
        said = client.stop_experiment(said["id"])
        print(f"DELETE /experiments/{said['id']}: {said['state']}")


class Visit:
    """A reader is shown a topic by ``version``, and has ``clicked`` on it or has not."""

    def __init__(self, client: Client, reader: Reader) -> None:
        body = json.dumps({"history": reader.history})
        answer = client.ask("headlines", body, "application/json", headers={"x-user": reader.name})
        self.reader = reader
        self.request_id = answer.request_id
        self.version = answer.version
        self.clicked = reader.clicks(answer.json()["topic"])


def show(said: dict) -> None:
    """Every arm's means, and in brackets where they are for sure, however often one looks."""
    print(f"{'arm':<10}{'version':<9}{'readers':>7}", *(f"{metric:>26}" for metric in said["metrics"]))
    for name, arm in said["arms"].items():
        figures = []
        for metric in said["metrics"].values():
            seen = metric["arms"][name]
            sure = f" [{seen['low']:.3f}, {seen['high']:.3f}]" if seen["low"] is not None else ""
            figures.append(f"{seen['mean']:.3f}{sure}")
        print(f"{name:<10}{arm['version']:<9}{arm['units']:>7,}", *(f"{figure:>26}" for figure in figures))
    for metric in said["metrics"].values():
        for difference in metric["differences"].values():
            print(difference["sentence"])
    print(said["sample_ratio"]["sentence"])
    print(said["sentence"])


def compare(client: Client, pool: ThreadPoolExecutor, id: str) -> None:
    """Popular against personal headlines, until it is known which readers prefer."""
    given: dict[str, str] = {}
    for number in range(1, PATIENCE + 1):
        readers = [Reader(f"reader-{number}-{i}") for i in range(TOGETHER)]
        visits = list(pool.map(lambda reader: Visit(client, reader), readers))
        given |= {visit.reader.name: visit.version for visit in visits}
        # Of a visit without a click nothing is posted: it counts as 0.
        events = [{"request_id": visit.request_id, "value": 1} for visit in visits if visit.clicked]
        counted = client.reward(id, *events)
        if number == 1:
            print(f"POST /experiments/{id}/events: {counted}")
            print(f"the same again: {client.reward(id, *events)}")
        clicks = client.experiment(id)["metrics"]["clicks"]
        means = ", ".join(f"{arm} {seen['mean']:.3f}" for arm, seen in clicks["arms"].items())
        verdict = clicks["differences"]["personal"]["verdict"]
        print(f"{number * TOGETHER:>6,} readers: clicks {means}: {verdict.replace('_', ' ')}")
        if verdict in ("better", "worse"):
            break
    again = random.Random(0).sample(sorted(given), 50)
    same = sum(Visit(client, Reader(name)).version == given[name] for name in again)
    print(f"{same} of {len(again)} readers who came again were given the version that they had")
    show(client.experiment(id))


def compare_with_itself(client: Client, pool: ThreadPoolExecutor, id: str) -> None:
    """The same version twice: whatever is seen of it is chance, and no look takes it for more."""
    for looks in range(8):
        readers = [Reader(f"someone-{looks}-{i}") for i in range(TOGETHER)]
        visits = pool.map(lambda reader: Visit(client, reader), readers)
        # An event may as well name the key: whatever this reader was given is what it is for.
        client.reward(id, *({"key": visit.reader.name, "value": 1} for visit in visits if visit.clicked))
        clicks = client.experiment(id)["metrics"]["clicks"]["differences"]["other"]
        if clicks["verdict"] in ("better", "worse"):
            print(f"after {(looks + 1) * TOGETHER:,} readers a difference was seen that is not there")
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
        with experiment(client, {**EXPERIMENT, "name": "A/A", "salt": "A/A", "arms": arms, "baseline": "one"}) as id:
            compare_with_itself(client, pool, id)
