"""Attacks on a running server: their registration, their target, and the outcome of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

KEYS = {"ops": "manage", "watch": "observe", "alpha": "infer", "beta": "infer"}  # name: role; key = name


@dataclass(frozen=True)
class Target:
    """A running server under attack.

    ``keys`` holds the server's keys by name, and is empty where the server requires none. The models
    ``echo``, ``slow`` (100 ms a request) and ``wide`` (an answer of 1 MiB) are registered with one replica
    each.
    """

    inference: str  # http://host:port
    management: str
    grpc: str  # host:port
    management_grpc: str
    home: Path  # of the server: model_store, state, logs, key_file.json
    processes: Callable[[], list[psutil.Process]]
    log: Callable[[], str]
    keys: dict[str, str] = field(default_factory=dict)

    def headers(self, name: str = "alpha") -> dict[str, str]:
        """Return the Authorization header of a key; none where the server requires no keys."""
        return {"authorization": f"Bearer {self.keys[name]}"} if self.keys else {}

    def infer(self, model: str = "echo", **options: object) -> httpx.Response:
        """Send one prediction as an ordinary client with the key ``alpha``."""
        url = f"{self.inference}/predictions/{model}"
        return httpx.post(url, headers=self.headers(), **{"content": b"x", "timeout": 30, **options})  # type: ignore[arg-type]

    def manage(self, method: str, path: str, **options: object) -> httpx.Response:
        """Send one request to the management API with the key ``ops``."""
        url = self.management + path
        return httpx.request(method, url, headers=self.headers("ops"), **{"timeout": 120, **options})  # type: ignore[arg-type]

    def memory(self) -> int:
        """Return the bytes of anonymous memory of the server's processes.

        USS has the pages of libraries, too, once the last other process that maps them has ended.
        """
        total = 0
        for process in self.processes():
            try:
                memory = process.memory_info()
            except psutil.Error:
                continue
            total += memory.rss - memory.shared
        return total


@dataclass(frozen=True)
class Outcome:
    """The measured effect of an attack; ``resisted`` is whether it stayed within the documented limits."""

    after: str
    resisted: bool


@dataclass(frozen=True)
class Attack:
    """An attack; ``before`` is its effect on the release without the limits, as it was measured."""

    area: str
    name: str
    before: str
    run: Callable[[Target], Outcome]
    keys: bool  # whether the server requires keys


ATTACKS: list[Attack] = []


def attack(
    area: str, name: str, before: str, *, keys: bool = True
) -> Callable[[Callable[[Target], Outcome]], Callable[[Target], Outcome]]:
    """Register a function as an attack of ``area``, which is named after its module in ``attacks``."""

    def register(run: Callable[[Target], Outcome]) -> Callable[[Target], Outcome]:
        ATTACKS.append(Attack(area, name, before, run, keys))
        return run

    return register
