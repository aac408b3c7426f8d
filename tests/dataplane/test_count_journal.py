"""Counts of experiments outlive the process that counted them, and are counted once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.metric_store import MetricStore
from serve_app.control.persistence.database import Database
from serve_app.dataplane.count_journal import CountJournal, abandoned_reports
from serve_app.dataplane.experiment_collector import ExperimentCollector, replay
from serve_app.dataplane.routing.version_router import VersionSelection
from serve_app.deployments.management_client import ReportQueue
from serve_app.domain.request import InferenceResponse
from serve_app.domain.routing_table import VersionRoute
from serve_app.domain.traffic_policy import ActiveSplit, StickyKey, allocate

pytestmark = pytest.mark.integration

ROUTE = VersionRoute("1.0", "ready", 1)
SPLIT = ActiveSplit(
    "trial",
    {"a": "1.0", "b": "2.0"},
    allocate({"a": 5000, "b": 5000}),
    "a",
    key=StickyKey(header="x-user"),
    outputs=(("score", "$.score"),),
    exposures=True,
    rewards=True,
    checks=True,
)


def record(collector: ExperimentCollector, count: int) -> None:
    """Record responses of every quality, and failures, for three users."""
    bodies = (b'{"score": 0.5}', b"{}", b'{"score": NaN}', b'{"score": "none"}')
    for number in range(count):
        choice = VersionSelection(ROUTE, SPLIT, "ab"[number % 2], number % 7, f"user {number % 3}")
        if number % 5 == 4:
            collector.record_failure(choice, f"r{number}", "handler_failed")
        else:
            reply = InferenceResponse(bodies[number % 4])
            collector.record_response(choice, f"r{number}", reply, 0.001 * (number + 1), number % 6 == 5)


COUNT_AND_WAIT = """
import sys
from pathlib import Path
from serve_app.dataplane.count_journal import CountJournal
from serve_app.dataplane.experiment_collector import ExperimentCollector
from tests.dataplane.test_count_journal import record
collector = ExperimentCollector(journal=CountJournal(Path(sys.argv[1]), "gateway"))
record(collector, 20)
collector.journal.seal(7)
collector.drain()
record(collector, 10)
print("counted", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Return the directory of a process that was killed with 20 requests in report 7, and 10 after it."""
    folder = tmp_path / "counts"
    command = [sys.executable, "-c", COUNT_AND_WAIT, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "counted\n"
        assert list(abandoned_reports(folder)) == [], "it runs"
        process.send_signal(signal.SIGKILL)
    return folder


def counts(store: MetricStore) -> tuple[int, int]:
    """Return the requests and the units of all arms."""
    arms = store.arm_stats("trial").values()
    return sum(stats.calls for stats in arms), sum(stats.units for stats in arms)


def queue_to(store: MetricStore, journals: Path) -> ReportQueue:
    async def observe(source: str, number: int, payloads: dict[str, Any]) -> bool:
        await store.record(source, number, payloads["trials"])
        return True

    return ReportQueue(observe, "another", journals)


@pytest.mark.parametrize("stored", [False, True], ids=["lost on the way", "acknowledgement lost"])
@pytest.mark.slow
def test_counts_of_a_killed_process_are_stored_once(killed: Path, tmp_path: Path, stored: bool) -> None:
    async def main() -> None:
        database = Database(f"sqlite:///{tmp_path / 'registry.db'}")
        store = MetricStore(database)
        if stored:
            collector = ExperimentCollector()
            record(collector, 20)
            report = collector.drain()
            assert report is not None
            await store.record("gateway", 7, report)
        reports = queue_to(store, killed)
        for _ in range(2):
            assert await reports.send_abandoned(30)
            assert counts(store) == (30, 3)
        await store.close()
        database.close()

    asyncio.run(main())
    assert list(killed.iterdir()) == []


def test_a_replayed_report_equals_the_one_that_was_drained(tmp_path: Path) -> None:
    journal = CountJournal(tmp_path, "gateway")
    collector = ExperimentCollector(journal=journal)
    record(collector, 50)
    drained = collector.drain()
    assert drained is not None
    journal.seal(1)
    os.close(journal._lock)  # as its process's death does
    [found] = abandoned_reports(tmp_path)
    replayed = replay(found.records)
    assert (found.source, found.number, replayed.figures) == ("gateway", 1, drained.figures)
    assert set(replayed.exposures) == set(drained.exposures)


def test_a_record_that_was_cut_off_ends_the_report(killed: Path) -> None:
    [open_part] = killed.glob("*/open")
    open_part.write_bytes(open_part.read_bytes()[:-3])
    assert [len(report.records) for report in abandoned_reports(killed)] == [20, 9]


def test_a_process_that_ends_in_order_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        database = Database(f"sqlite:///{tmp_path / 'registry.db'}")
        store = MetricStore(database)
        reports = queue_to(store, tmp_path / "counts")
        collector = ExperimentCollector(journal=reports.journal)
        reports.sources["trials"] = collector.drain
        for _ in range(2):
            record(collector, 10)
            assert await reports.send_pending(30)
        record(collector, 10)
        await reports.drain(30)
        assert counts(store)[0] == 30
        await store.close()
        database.close()

    asyncio.run(main())
    assert list((tmp_path / "counts").iterdir()) == []


def test_a_journal_that_cannot_be_written_counts_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    collector = ExperimentCollector(journal=CountJournal(tmp_path / "file", "gateway"))
    record(collector, 10)
    report = collector.drain()
    assert report is not None and sum(arm.calls for arm in report.figures["trial"].values()) == 10
    assert "Counts of experiments are lost if this process dies." in caplog.text
    assert len(caplog.records) == 1


def test_a_journal_is_bounded(tmp_path: Path) -> None:
    journal = CountJournal(tmp_path, "gateway", max_bytes=2000)
    record(ExperimentCollector(journal=journal), 1000)
    assert sum(file.stat().st_size for file in tmp_path.glob("*/open")) < 3000
    journal.close()


def test_names_of_processes_are_file_names(tmp_path: Path) -> None:
    journal = CountJournal(tmp_path, "../m--1.0#a/b")
    journal.append(("record",))
    assert [folder.parent for folder in tmp_path.iterdir()] == [tmp_path]
    journal.close()
