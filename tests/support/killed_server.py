"""A control plane that changes its registry at random and kills itself at a random write."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from serve_app.control.access.store import KeyStore
from serve_app.control.persistence.database import Database
from serve_app.control.persistence.schema import ASYNC_PREDICTIONS
from serve_app.control.registry import Registry
from serve_app.domain.async_prediction import StoredRequest
from serve_app.domain.model import Registration
from serve_app.errors import RelayError
from tests.support.archives import ECHO, make_archive
from tests.support.control_services import OPERATOR, ControlServices
from tests.support.power_failure import permit_strace

MAX_WRITES = 60  # of a start, at one of which it is killed
NAMES = ("a", "b", "c")
EXPERIMENT = {
    "name": "e",
    "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
    "metrics": [{"name": "clicks", "kind": "reward"}],
    "baseline": "a",
}


@dataclass
class Stored:
    """The stored state: the registry, the digests of keys by name, and the ids of predictions."""

    registry: Registry
    keys: dict[str, bytes] = field(default_factory=dict)
    predictions: set[str] = field(default_factory=set)

    def parts(self) -> dict[str, Any]:
        """Return the parts; a change concerns one of them."""
        of_models = {f"model {name}": record for name, record in self.registry.models.items()}
        of_experiments = {f"experiment {id}": value for id, value in self.registry.experiments.items()}
        of_keys = {f"key {name}": digest for name, digest in self.keys.items()}
        return {**of_models, **of_experiments, **of_keys, **dict.fromkeys(self.predictions)}


# In the process that is killed


def serve(home: Path, seed: int, acknowledgements: Connection) -> None:
    """Change a registry at random, when a message permits it, until this process kills itself at a write."""
    permit_strace()
    acknowledgements.recv_bytes()
    randomness = random.Random(seed)
    remaining = randomness.randrange(1, MAX_WRITES)

    def count_write(*args: Any) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def count_statement(connection: Any, cursor: Any, statement: str, *args: Any) -> None:
        if not statement.startswith(("SELECT", "PRAGMA", "BEGIN")):
            count_write()

    async def change() -> None:
        services = ControlServices(home)
        engine = services.database._engine
        sa.event.listen(engine, "before_cursor_execute", count_statement)
        sa.event.listen(engine, "commit", count_write)
        sa.event.listen(engine, "checkin", count_write)  # stored, and not acknowledged yet
        await services.start()
        while True:
            with contextlib.suppress(RelayError):  # refused, as the removal of a missing version
                await choose_change(services, randomness)
            acknowledgements.send_bytes(pickle.dumps(remember(services)))

    asyncio.run(change())


def remember(services: ControlServices) -> Stored:
    keys = {key.document.name: key.digest for key in services.api_keys.stored}
    return Stored(services.state.registry, keys, set(services.predictions._all))


async def choose_change(services: ControlServices, randomness: random.Random) -> None:
    """Make one change at random."""
    control, registry = services.control, services.state.registry
    name = randomness.choice(NAMES)
    running = [e.id for e in registry.experiments.values() if e.running and e.model == name]
    stopped = [e.id for e in registry.experiments.values() if not e.running]
    known = [key.document.name for key in services.api_keys.stored]
    version = randomness.choice(("1.0", "2.0"))
    registration = Registration(f"m-{version}.mar", model_name=name, initial_workers=1, wait=False)
    request = StoredRequest("a", None, "POST", "/predictions/a", "", (), b"x", "id")
    changes: list[Callable[[], Any]] = [
        lambda: control.register(registration),
        lambda: control.register(registration),
        lambda: control.scale(name, version, randomness.randrange(3), 3, wait=False),
        lambda: control.api.set_default(name, version),
        lambda: control.unregister(name, version),
        lambda: control.set_traffic(name, {"labels": {"next": version}}),
        lambda: control.reset_traffic(name),
        lambda: control.start_experiment(name, EXPERIMENT),
        lambda: control.create_key({"name": f"key-{name}"}, OPERATOR),
        lambda: control.api.submit_prediction(request),
    ]
    if running:
        changes += [lambda: control.api.stop_experiment(running[0], ("*",))]
    if stopped:
        changes += [lambda: control.api.delete_experiment(stopped[0], ("*",))]
    if known:
        changes += [lambda: control.rotate_key(known[0], {}, OPERATOR)]
        changes += [lambda: control.api.revoke_key(known[0], OPERATOR)]
    await randomness.choice(changes)()


# In the process of the test


def load(home: Path) -> Stored:
    """Return what is stored."""
    database = Database(f"sqlite:///{home / 'state/registry.db'}")
    keys = {key.document.name: key.digest for key in KeyStore(database).load()}
    with database.transaction() as connection:
        predictions = set(connection.execute(sa.select(ASYNC_PREDICTIONS.c.id)).scalars())
    stored = Stored(database.load(), keys, predictions)
    database.close()
    return stored


def make_archives(home: Path) -> None:
    (home / "model_store").mkdir()
    for version in ("1.0", "2.0"):
        make_archive(home / "model_store", "m", ECHO, version)


def run_until_killed(
    home: Path, seed: int, started: Callable[[int], object] = lambda process: None
) -> Iterator[Stored]:
    """Run one server and yield the state at each acknowledgement.

    ``started`` is called before its first change, with its process id.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "fsspec"])  # and a fork has nothing to import
    acknowledgements, theirs = context.Pipe()
    server = context.Process(target=serve, args=(home, seed, theirs), daemon=True)
    server.start()
    theirs.close()
    started(server.pid or 0)
    acknowledgements.send_bytes(b"")
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            yield pickle.loads(acknowledgements.recv_bytes())
    acknowledgements.close()
    server.join()
    assert server.exitcode == -signal.SIGKILL, f"seed {seed}: it ended by itself"


def lost_changes(acknowledged: Stored, stored: Stored) -> set[str]:
    """Return the parts that differ; the removal of a model also removes its experiments."""
    differing = differing_parts(acknowledged, stored)
    return {part for part in differing if not is_removed_with_its_model(part, acknowledged, stored)}


def differing_parts(before: Stored, after: Stored) -> set[str]:
    old, new = before.parts(), after.parts()
    return {part for part in {**old, **new} if part not in old or part not in new or old[part] != new[part]}


def is_removed_with_its_model(part: str, before: Stored, after: Stored) -> bool:
    kind, _, id = part.partition(" ")
    experiment = before.registry.experiments.get(id) if kind == "experiment" else None
    return experiment is not None and experiment.model not in after.registry.models
