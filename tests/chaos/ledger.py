"""Changes through the management API, and what each acknowledgement promises about the state afterwards.

Every subject has one writer, which sends its next change after the response to the last one. A change without
a clear response may or may not be in force, also later, so its subject is left alone from then on.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.parts import ECHO, Server, make_archive

_TIMEOUT_S = 30.0  # of one change; a database is waited for, for 20 s


@dataclass(frozen=True)
class State:
    """The stored state of one model: its versions, their shares, and the ids of its running experiments."""

    versions: tuple[str, ...] = ()
    share: int = 0  # basis points of version 2.0
    experiments: int = 0


@dataclass
class _Subject:
    name: str
    allowed: list[State] = field(default_factory=lambda: [State()])


class Ledger:
    """A writer of changes in a thread of its own, between ``__enter__`` and ``__exit__``.

    ``acknowledged`` counts changes by kind, ``refused`` the others by status or error, and ``longest`` is the
    slowest response in seconds.
    """

    def __init__(self, server: Server, seed: int = 0) -> None:
        self.acknowledged: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.longest = 0.0
        self.last_ok = 0.0  # time.monotonic of the last acknowledgement
        self._management = server.process.management
        self._random = random.Random(seed)
        self._subjects: list[_Subject] = []
        self._numbers = itertools.count(seed * 100_000)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger")
        for version in ("1.0", "2.0"):
            make_archive(server.store, "ledger", ECHO, version)

    def __enter__(self) -> Ledger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def lost(self) -> list[str]:
        """Return the subjects whose state no sequence of acknowledged changes explains; drop all subjects."""
        wrong = []
        with httpx.Client(base_url=self._management, timeout=_TIMEOUT_S) as client:
            for subject in self._subjects:
                observed = _observe(client, subject.name)
                if observed not in subject.allowed:
                    wrong.append(f"{subject.name}: {observed}, not one of {subject.allowed}")
                for id in _experiment_ids(client, subject.name):
                    client.delete(f"/experiments/{id}")
                for version in reversed(observed.versions):
                    client.delete(f"/models/{subject.name}/{version}")
        self._subjects.clear()
        return wrong

    def _run(self) -> None:
        with httpx.Client(base_url=self._management, timeout=_TIMEOUT_S) as client:
            while not self._over.is_set():
                subject = _Subject(f"ledger-{next(self._numbers)}")
                self._subjects.append(subject)
                for kind, after, send in self._life(client, subject):
                    if self._over.is_set() or not self._change(subject, kind, after, send):
                        break

    def _life(
        self, client: httpx.Client, subject: _Subject
    ) -> Iterator[tuple[str, State, Callable[[], httpx.Response]]]:
        """Yield the changes of one model from its registration to its removal, which some models keep out."""
        name, share = subject.name, self._random.randrange(1, 10_000)
        both, model = ("1.0", "2.0"), f"/models/{subject.name}"
        weights = {"versions": {"1.0": 10_000 - share, "2.0": share}}

        def register(version: str) -> httpx.Response:
            query = {"url": f"ledger-{version}.mar", "model_name": name, "initial_workers": "0"}
            return client.post("/models", params=query)

        yield "register", State(both[:1]), lambda: register("1.0")
        yield "register", State(both), lambda: register("2.0")
        yield "traffic", State(both, share), lambda: client.put(f"{model}/traffic", json=weights)
        yield "traffic", State(both), lambda: client.delete(f"{model}/traffic")
        started: list[httpx.Response] = []

        def start() -> httpx.Response:
            started.append(client.post(f"{model}/experiments", json=EXPERIMENT))
            return started[0]

        yield "experiment", State(both, 0, 1), start
        stop = f"/experiments/{started[0].json()['id']}"
        if self._random.random() < 0.8:
            yield "experiment", State(both), lambda: client.delete(stop)
            if self._random.random() < 0.8:
                yield "unregister", State(both[:1]), lambda: client.delete(f"{model}/2.0")
                yield "unregister", State(), lambda: client.delete(model)

    def _change(self, subject: _Subject, kind: str, after: State, send: Callable[[], httpx.Response]) -> bool:
        """Send one change; return whether it was acknowledged."""
        subject.allowed = [subject.allowed[-1], after]
        began = time.monotonic()
        try:
            response = send()
        except (httpx.HTTPError, LookupError, ValueError) as error:
            self.refused[type(error).__name__] += 1
            self._over.wait(0.2)  # a refused connection is refused at once
            return False
        finally:
            self.longest = max(self.longest, time.monotonic() - began)
        if response.status_code >= 300:
            self.refused[f"status {response.status_code}"] += 1
            self._over.wait(0.2)
            return False
        subject.allowed = [after]
        self.acknowledged[kind] += 1
        self.last_ok = time.monotonic()
        self._over.wait(0.02)
        return True


EXPERIMENT = {
    "name": "chaos",
    "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
    "baseline": "a",
    "metrics": [{"name": "seconds", "kind": "latency"}, {"name": "failures", "kind": "error_rate"}],
}


def _observe(client: httpx.Client, model: str) -> State:
    described = client.get(f"/models/{model}/all")
    if described.status_code == 404:
        return State()
    versions = tuple(sorted(entry["modelVersion"] for entry in described.raise_for_status().json()))
    policy = client.get(f"/models/{model}/traffic").raise_for_status().json()
    share = int((policy.get("versions") or {}).get("2.0", 0)) if policy.get("policy") == "weighted" else 0
    return State(versions, share, len(_experiment_ids(client, model)))


def _experiment_ids(client: httpx.Client, model: str) -> list[str]:
    found: Any = client.get(f"/models/{model}/experiments")
    if found.status_code != 200:
        return []
    return [entry["id"] for entry in found.json()["experiments"] if entry["state"] == "running"]
