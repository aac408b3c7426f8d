"""The publisher: tables reach every reader, and a change counts as in force when they all have it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from serve_app.control import table_publisher
from serve_app.control.table_publisher import TablePublisher
from serve_app.domain.access import AccessTable
from serve_app.domain.routing_table import ModelRoute, RoutingTable, TableDelta, VersionRoute
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.metrics_aggregator import MetricsAggregator


async def nobody() -> set[str]:
    return set()


def everybody(*sources: str):
    async def alive() -> set[str]:
        return set(sources)

    return alive


class Reader:
    """A reader like ManagementClient, on the same event loop."""

    def __init__(self, publisher: TablePublisher, source: str) -> None:
        self.publisher, self.source, self.meters, self.table = publisher, source, Meters(), RoutingTable()
        self.deltas: list[TableDelta] = []
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        samples = self.meters.report()
        while True:
            answer = await self.publisher.poll(self.source, self.table.generation, samples)
            samples = self.meters.report(answer == "all samples") if isinstance(answer, str) else None
            if isinstance(answer, TableDelta):
                self.deltas.append(answer)
                self.table = answer.apply(self.table)
            elif isinstance(answer, RoutingTable):
                self.table = answer


def test_a_change_is_in_force_when_every_reader_has_it() -> None:
    async def main() -> None:
        publisher = TablePublisher(MetricsAggregator())
        readers = [Reader(publisher, str(i)) for i in range(5)]
        await asyncio.sleep(0)
        for _ in range(20):
            publisher.publish(RoutingTable(publisher.next_generation()))
            assert await publisher.wait_until_applied(60.0, everybody("0", "1", "2", "3", "4")) == []
            assert {r.table.generation for r in readers} == {publisher.table.generation}
        for reader in readers:
            reader.task.cancel()

    asyncio.run(main())


def test_a_reader_receives_only_the_rows_that_changed() -> None:
    row, access = ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)}), AccessTable({})
    changed = ModelRoute("2.0", row.versions)
    tables = [
        {"a": row, "b": row},
        {"a": row, "b": changed},
        {"a": row, "c": row},
        {},
        {"d": row},
    ]

    async def main() -> None:
        publisher = TablePublisher(MetricsAggregator())
        reader = Reader(publisher, "r")
        await asyncio.sleep(0)
        for models in tables:
            generation = publisher.next_generation()
            publisher.publish(RoutingTable(generation, models, bool(models), access, on_loopback=True))
            await publisher.wait_until_applied(60.0, everybody("r"))
            assert reader.table == publisher.table
        assert [(set(d.changed), set(d.removed)) for d in reader.deltas] == [
            ({"b"}, set()),
            ({"c"}, {"b"}),
            (set(), {"a", "c"}),
            ({"d"}, set()),
        ]
        assert all(delta.rest.access is None for delta in reader.deltas)
        publisher.publish(replace(publisher.table, generation=publisher.next_generation(), access=None))
        await publisher.wait_until_applied(60.0, everybody("r"))
        assert reader.table.access is None
        assert isinstance(await publisher.poll("new", 0, None), RoutingTable)
        reader.task.cancel()

    asyncio.run(main())


def test_a_reader_that_was_killed_holds_nobody_up() -> None:
    async def main() -> None:
        publisher = TablePublisher(MetricsAggregator())
        living, dead = Reader(publisher, "living"), Reader(publisher, "dead")
        await asyncio.sleep(0)
        dead.task.cancel()
        publisher.publish(RoutingTable(publisher.next_generation()))
        started = asyncio.get_running_loop().time()
        assert await publisher.wait_until_applied(60.0, everybody("living")) == []
        assert asyncio.get_running_loop().time() - started < 30.0
        living.task.cancel()

    asyncio.run(main())


def test_a_live_reader_that_lags_is_named() -> None:
    async def main() -> None:
        publisher = TablePublisher(MetricsAggregator())
        slow = asyncio.create_task(publisher.poll("slow", 0, Meters().report()))
        await asyncio.sleep(0)
        publisher.publish(RoutingTable(publisher.next_generation()))
        assert await publisher.wait_until_applied(0.1, everybody("slow")) == ["slow"]
        await slow

    asyncio.run(main())


def test_readers_of_a_board_that_crashed_are_waited_for() -> None:
    async def main() -> None:
        publisher = TablePublisher(MetricsAggregator())
        publisher.expect_readers({"back", "gone"})
        publisher.publish(RoutingTable(publisher.next_generation()))
        change = asyncio.create_task(publisher.wait_until_applied(60.0, everybody("back")))
        await asyncio.sleep(0)
        assert not change.done(), "nobody has the table yet"
        back = Reader(publisher, "back")
        assert await change == []
        assert back.table == publisher.table
        back.task.cancel()

    asyncio.run(main())


def test_samples_are_collected_from_all_and_outlive_their_reader() -> None:
    async def main() -> None:
        total = MetricsAggregator()
        publisher = TablePublisher(total)
        readers = [Reader(publisher, str(i)) for i in range(3)]
        await asyncio.sleep(0)
        for reader in readers:
            reader.meters.request("m", "1.0", "ok", 0.01)
            reader.meters.depth("m", "1.0", 2)
        await publisher.collect_metrics(60.0, everybody("0", "1", "2"))
        assert total.total("torchrelay_requests", model="m", status="ok") == 3
        assert total.total("torchrelay_queue_depth", model="m") == 6
        readers[0].task.cancel()
        publisher.disconnect("0")
        assert total.total("torchrelay_requests", model="m") == 3, "what it counted stays counted"
        assert total.total("torchrelay_queue_depth", model="m") == 4, "what it held is gone"
        for reader in readers:
            reader.task.cancel()

    asyncio.run(main())


def test_a_short_collection_neither_waits_for_a_slow_reader_nor_looks_it_up() -> None:
    async def look_up() -> set[str]:
        raise AssertionError("a call of Ray Serve's controller")

    async def main() -> None:
        total = MetricsAggregator()
        publisher = TablePublisher(total)
        slow, fast = Meters(), Reader(publisher, "fast")
        slow.depth("m", "1.0", 2)
        await publisher.poll("slow", -1, slow.report())
        slow.depth("m", "1.0", 5)
        fast.meters.depth("m", "1.0", 1)
        await publisher.collect_metrics(0.01, look_up)
        assert total.total("torchrelay_queue_depth") == 3, "what it has sent before"
        fast.task.cancel()

    asyncio.run(main())


def test_a_reader_that_was_dropped_sends_all_its_samples_again() -> None:
    async def main() -> None:
        total = MetricsAggregator()
        publisher = TablePublisher(total, poll_timeout=0.05)
        reader = Reader(publisher, "r")
        await asyncio.sleep(0)
        reader.meters.depth("a", "1.0", 1)
        await publisher.collect_metrics(60.0, everybody("r"))
        publisher.disconnect("r")
        reader.meters.depth("b", "1.0", 2)
        while total.total("torchrelay_queue_depth") < 3:  # the report with b alone is not enough
            await asyncio.sleep(0.01)
            await publisher.collect_metrics(60.0, everybody("r"))
        reader.task.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_reader_that_was_paused_is_counted_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_publisher, "_SILENT_CHECK_S", 0.0)  # a busy machine may delay the other reader
    caplog.set_level("INFO", "serve_app")

    async def main() -> None:
        total = MetricsAggregator()
        publisher = TablePublisher(total, poll_timeout=0.05)
        paused, other = Reader(publisher, "paused"), Reader(publisher, "other")
        await asyncio.sleep(0)
        paused.meters.request("m", "1.0", "ok", 0.01)
        paused.meters.depth("m", "1.0", 1)
        paused.meters.request("m", "1.0", "ok", 0.01)
        await publisher.collect_metrics(60.0, everybody("paused", "other"))
        paused.task.cancel()
        while total.total("torchrelay_queue_depth"):  # until it is dropped, with its gauges
            await asyncio.sleep(0.05)
            await publisher.collect_metrics(0.01, nobody)
        await publisher.collect_metrics(60.0, everybody("paused", "other"))
        assert total.total("torchrelay_requests") == 2
        paused.meters.request("m", "1.0", "ok", 0.01)
        paused.task = asyncio.create_task(paused.run())
        await asyncio.sleep(0)
        await publisher.collect_metrics(60.0, everybody("paused", "other"))
        assert total.total("torchrelay_requests") == 3
        assert total.total("torchrelay_queue_depth") == 1
        for reader in (paused, other):
            reader.task.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))
    *_, silent, again = (message for message in caplog.messages if "replica paused " in message)
    assert silent.startswith("The process of replica paused runs, and has not polled")
    assert again == "The process of replica paused polls again"


def test_a_change_outlasts_a_controller_that_cannot_list_replicas() -> None:
    async def broken() -> set[str]:
        raise RuntimeError("the controller has ended")

    async def hanging() -> set[str]:
        await asyncio.Event().wait()
        return set()

    async def main() -> None:
        for live_readers in (broken, hanging):
            publisher = TablePublisher(MetricsAggregator())
            slow = asyncio.create_task(publisher.poll("slow", 0, Meters().report()))
            await asyncio.sleep(0)
            publisher.publish(RoutingTable(publisher.next_generation()))
            assert await publisher.wait_until_applied(0.5, live_readers) == ["slow"]
            await slow

    asyncio.run(asyncio.wait_for(main(), 60))


def test_generations_go_up_even_when_a_reader_knows_a_later_one() -> None:
    async def main() -> None:
        publisher = TablePublisher(MetricsAggregator(), poll_timeout=0.05)
        publisher.publish(RoutingTable(10, access=AccessTable({})))
        answer = await publisher.poll("r", 10**18, None)
        assert isinstance(answer, RoutingTable) and answer.generation > 10**18
        assert answer.access == AccessTable({}), "a door that wants keys goes on wanting them"
        assert publisher.next_generation() > 10**18

    asyncio.run(main())


def test_a_poll_ends_after_its_timeout_with_a_request_for_samples() -> None:
    async def main() -> None:
        publisher = TablePublisher(MetricsAggregator(), poll_timeout=0.05)
        assert await publisher.poll("r", 0, None) == "samples"

    asyncio.run(main())
