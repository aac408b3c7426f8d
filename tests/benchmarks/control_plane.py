"""Times of the control plane with many versions and nodes, simulated without Ray.

``python -m tests.benchmarks.control_plane [--versions 10000] [--nodes 100]`` stores the versions in SQLite,
publishes the routing table to one reader for each node over the real publisher, and registers one version
more at a time. Readers receive pickled answers, as between processes. Times are those of one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import pickle
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from serve_app.control import registry_changes
from serve_app.control.persistence.database import Database
from serve_app.control.reconciler import plan
from serve_app.control.registry import ModelRecord, Registry, desired_states
from serve_app.control.replica_health import HealthTracker, ObservedApp
from serve_app.control.state import AcknowledgementPolicy, StateStore
from serve_app.control.table_publisher import TablePublisher
from serve_app.deployments.options import autoscaling_config, user_config
from serve_app.domain.model import ModelSpec, ReplicaInfo
from serve_app.domain.routing_table import RoutingTable, TableDelta
from serve_app.settings import Settings
from serve_app.telemetry.metrics_aggregator import MetricsAggregator

_CHANGES = 10


@dataclass
class Timings:
    """Seconds by operation, and bytes of what a reader receives."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    table_bytes: int = 0
    delta_bytes: int = 0

    @contextmanager
    def measure(self, operation: str) -> Iterator[None]:
        started_at = time.perf_counter()
        yield
        self.seconds.setdefault(operation, []).append(time.perf_counter() - started_at)


class Node:
    """A reader of the routing table.

    It unpickles the changes; a whole table is unpickled by the node itself, which is not simulated.
    """

    def __init__(self, publisher: TablePublisher, name: str) -> None:
        self.table = RoutingTable()
        self._publisher, self._name = publisher, name

    async def run(self, timings: Timings) -> None:
        while True:
            answer = await self._publisher.poll(self._name, self.table.generation, None)
            if isinstance(answer, TableDelta):
                received = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
                timings.delta_bytes = len(received)
                self.table = pickle.loads(received).apply(self.table)
            elif isinstance(answer, RoutingTable):
                received = self._publisher.pickle_table()
                timings.table_bytes = len(received)
                self.table = answer


def simulate(versions: int, nodes: int) -> Timings:
    """Return the times of the control plane with ``versions`` models of one version each."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder, 'registry.db')}"
        registry = Registry({f"m{i}": ModelRecord("1.0", {"1.0": _spec(i)}) for i in range(versions)})
        with contextlib.closing(Database(url)) as written:
            written.save(Registry(), registry)
        with contextlib.closing(Database(url)) as database:
            return asyncio.run(_simulate(versions, nodes, database))


async def _simulate(versions: int, nodes: int, database: Database) -> Timings:
    timings = Timings()
    with timings.measure("start: load the registry"):
        registry = database.load()
    health, publisher = HealthTracker(), TablePublisher(MetricsAggregator())

    async def live_readers() -> set[str]:
        return {str(number) for number in range(nodes)}

    policy = AcknowledgementPolicy(live_readers, timeout=60.0)
    state = StateStore(database, registry, publisher, health, None, policy, lambda before, after: None)
    settings = Settings()
    observed = _observe(registry, settings)
    health.update(desired_states(registry), observed, {})
    with timings.measure("start: first table"):
        state.publish()
    publisher.expect_readers(await live_readers())
    readers = [Node(publisher, str(number)) for number in range(nodes)]
    tasks = [asyncio.create_task(reader.run(timings)) for reader in readers]
    with timings.measure("start: all nodes have the table"):
        await state.wait_until_applied()
    for number in range(_CHANGES):
        after = registry_changes.register(state.registry, _spec(versions + number))
        with timings.measure("change: commit until all nodes apply it"):
            await state.commit(after)
        with timings.measure("round of the reconcile loop"):
            desired = desired_states(state.registry)
            health.update(desired, observed, observed)
            plan(desired, observed, partial(user_config, settings), autoscaling_config)
            state.publish()
    assert all(reader.table.generation == publisher.table.generation for reader in readers)
    for task in tasks:
        task.cancel()
    return timings


def _spec(number: int) -> ModelSpec:
    name = f"m{number}"
    config = {"batchSize": 8, "maxBatchDelay": 5}
    return ModelSpec(
        name, "1.0", f"{name}.mar", f"{number:064d}", f"file:///{name}.mar", "", "python", 1, 1, config=config
    )


def _observe(registry: Registry, settings: Settings) -> dict[str, ObservedApp]:
    return {
        app: ObservedApp(
            app,
            state.route,
            1,
            user_config(settings, state),
            0,
            "RUNNING",
            "",
            (ReplicaInfo(app, 1, 0.0, True),),
        )
        for app, state in desired_states(registry).items()
    }


def main() -> None:
    """Simulate and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.control_plane", description=__doc__)
    parser.add_argument("--versions", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=100)
    options = parser.parse_args()
    timings = simulate(options.versions, options.nodes)
    title = f"{options.versions:,} versions, {options.nodes} nodes"
    table = Table("operation", "median", "maximum", title=title)
    for operation, seconds in timings.seconds.items():
        table.add_row(operation, f"{statistics.median(seconds):.3f} s", f"{max(seconds):.3f} s")
    table.add_row(
        "a whole table, and a change of it", f"{timings.table_bytes:,} B", f"{timings.delta_bytes:,} B"
    )
    Console().print(table)


if __name__ == "__main__":
    main()
