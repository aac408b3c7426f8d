"""Changes through the management API, and what each acknowledgement promises about the state afterwards.

One writer sends its next change after the response to the last one. A change without a clear response may be
in force or not, also later, so the state after it stays among those that are allowed.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx

from tests.support.archives import ECHO, make_archive
from tests.support.server import Server

_TIMEOUT_S = 30.0  # of one change; a database is waited for, for 20 s


@dataclass(frozen=True)
class State:
    """The stored state of one model: versions, the most workers, shares, and running experiments."""

    versions: tuple[str, ...] = ()
    max_workers: int = 0  # of version 1.0
    share: int = 0  # basis points of version 2.0
    experiments: int = 0


@dataclass
class _Subject:
    """A model, the states that acknowledgements allow, and those of changes without a clear response."""

    name: str
    allowed: list[State] = field(default_factory=lambda: [State()])
    unsure: list[State] = field(default_factory=list)


Change = tuple[str, State, Callable[[], httpx.Response]]  # its kind, the state after it, and its request


class ChangeWriter:
    """A writer of changes in a thread of its own, between ``__enter__`` and ``__exit__``.

    Models without workers are registered, scaled and removed; the model ``routed``, whose two versions run,
    gets shares and experiments. ``acknowledged`` counts changes by kind, ``refused`` the others by kind and
    response, and ``longest`` is the slowest response in seconds.
    """

    def __init__(self, server: Server, seed: int = 0) -> None:
        self.acknowledged: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.longest = 0.0
        self.last_ok = 0.0  # time.monotonic of the last acknowledgement
        self._management = server.process.management
        self._random = random.Random(seed)
        self._numbers = itertools.count(seed * 100_000)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="change")
        for version in BOTH:
            make_archive(server.store, "change", ECHO, version)
        self._routed = _Subject("routed", [State(BOTH, 1)])
        self._subjects = [self._routed]

    def __enter__(self) -> ChangeWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def lost(self) -> list[str]:
        """Return the subjects whose state no sequence of acknowledged changes explains; restore them all."""
        wrong = []
        with httpx.Client(base_url=self._management, timeout=_TIMEOUT_S) as client:
            for subject in self._subjects:
                observed = _observe(client, subject.name)
                if observed not in subject.allowed:
                    wrong.append(f"{subject.name}: {observed}, not one of {subject.allowed}")
                for id in _experiment_ids(client, subject.name):
                    client.delete(f"/experiments/{id}")
                if subject is self._routed:
                    client.delete("/models/routed/traffic")
                    continue
                for version in reversed(observed.versions):
                    client.delete(f"/models/{subject.name}/{version}")
        return wrong

    def _run(self) -> None:
        with httpx.Client(base_url=self._management, timeout=_TIMEOUT_S) as client:
            while not self._over.is_set():
                self._change(self._routed, *self._reroute(client))
                subject = _Subject(f"change-{next(self._numbers)}")
                self._subjects.append(subject)
                for change in self._life(client, subject.name):
                    if self._over.is_set() or not self._change(subject, *change):
                        break

    def _life(self, client: httpx.Client, name: str) -> Iterator[Change]:
        """Yield the changes of one model from its registration to its removal, which some do not reach."""

        def register(version: str) -> httpx.Response:
            query = {"url": f"change-{version}.mar", "model_name": name, "initial_workers": "0"}
            return client.post("/models", params=query)

        yield "register", State(BOTH[:1]), lambda: register("1.0")
        workers = 0
        if self._random.random() < 0.3:
            workers = self._random.randrange(1, 5)
            bounds = {"min_worker": 0, "max_worker": workers}
            yield "scale", State(BOTH[:1], workers), lambda: client.put(f"/models/{name}/1.0", params=bounds)
        yield "register", State(BOTH, workers), lambda: register("2.0")
        if self._random.random() < 0.8:
            yield "unregister", State(BOTH[:1], workers), lambda: client.delete(f"/models/{name}/2.0")
            yield "unregister", State(), lambda: client.delete(f"/models/{name}")

    def _reroute(self, client: httpx.Client) -> Change:
        """Return the next change of the shares and the experiments of ``routed``."""
        before = self._routed.allowed[-1]
        if before.experiments:

            def stop() -> httpx.Response:
                return client.delete(f"/experiments/{_experiment_ids(client, 'routed')[0]}")

            return "experiment", replace(before, experiments=0), stop
        if before.share:
            return "traffic", replace(before, share=0), lambda: client.delete("/models/routed/traffic")
        if self._random.random() < 0.5:
            begin = partial(client.post, "/models/routed/experiments", json=EXPERIMENT)
            return "experiment", replace(before, experiments=1), begin
        share = self._random.randrange(1, 10_000)
        weights = {"versions": {"1.0": 10_000 - share, "2.0": share}}
        set_weights = partial(client.put, "/models/routed/traffic", json=weights)
        return "traffic", replace(before, share=share), set_weights

    def _change(self, subject: _Subject, kind: str, after: State, send: Callable[[], httpx.Response]) -> bool:
        """Send one change; return whether it was acknowledged."""
        began, failure = time.monotonic(), ""
        try:
            response = send()
            if response.status_code >= 300:
                failure = f"status {response.status_code}"
        except (httpx.HTTPError, LookupError, ValueError) as error:
            failure = type(error).__name__
        self.longest = max(self.longest, time.monotonic() - began)
        if not failure:
            subject.allowed = [*subject.unsure, after]
            self.acknowledged[kind] += 1
            self.last_ok = time.monotonic()
            self._over.wait(0.02)
            return True
        # It may be in force, now or later.
        self.refused[f"{kind}: {failure}"] += 1
        subject.unsure.append(after)
        subject.allowed = [*subject.unsure, *subject.allowed]
        self._over.wait(0.2)
        return False


BOTH = ("1.0", "2.0")
EXPERIMENT = {
    "name": "chaos",
    "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
    "baseline": "a",
    "metrics": [{"name": "seconds", "kind": "latency"}, {"name": "failures", "kind": "error_rate"}],
}


def _observe(client: httpx.Client, model: str) -> State:
    if client.get(f"/models/{model}/all").status_code == 404:
        return State()
    described = client.get(f"/models/{model}/all").raise_for_status()
    entries = {entry["modelVersion"]: entry for entry in described.json()}
    policy = client.get(f"/models/{model}/traffic").raise_for_status().json()
    share = int((policy.get("versions") or {}).get("2.0", 0)) if policy.get("policy") == "weighted" else 0
    workers = int(entries["1.0"]["maxWorkers"]) if "1.0" in entries else 0
    return State(tuple(sorted(entries)), workers, share, len(_experiment_ids(client, model)))


def _experiment_ids(client: httpx.Client, model: str) -> list[str]:
    found: Any = client.get(f"/models/{model}/experiments")
    if found.status_code != 200:
        return []
    return [entry["id"] for entry in found.json()["experiments"] if entry["state"] == "running"]
