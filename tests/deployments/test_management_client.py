"""What a process has to tell: sent until it is acknowledged, under one number, and nothing is taken
meanwhile.
"""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from serve_app.dataplane.data_plane import RoutingTableReader
from serve_app.deployments.management_client import ManagementClient, ReportQueue
from serve_app.domain.routing_table import RoutingTable
from serve_app.telemetry.descriptors import DescriptorCheck
from serve_app.telemetry.metrics import Meters


class Management:
    """The other end of the line. It counts each number once; ``answers`` are what its caller hears of it."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.received: list[int] = []
        self.counted: dict[int, Any] = {}

    async def observe(self, source: str, number: int, payloads: dict[str, Any]) -> bool:
        self.received.append(number)
        answer = self.answers.pop(0) if self.answers else True
        if answer != "down":
            self.counted.setdefault(number, payloads)
        if isinstance(answer, float):
            await asyncio.sleep(answer)
        if isinstance(answer, str):
            raise ConnectionError(answer)
        return bool(answer)


def test_what_is_new_is_sent_by_name_and_nothing_where_nothing_is() -> None:
    async def main() -> None:
        management = Management()
        outbox = ReportQueue(management.observe, "gateway", Path("unused"))
        news = iter([None, 1, None, 2])
        outbox.sources["trials"] = lambda: next(news)
        outbox.sources["shadow"] = lambda: None
        for _ in range(4):
            assert await outbox.send_pending(1)
        assert management.counted == {1: {"trials": 1}, 2: {"trials": 2}}

    asyncio.run(main())


def test_the_same_is_sent_under_the_same_number_until_it_is_acknowledged() -> None:
    async def main() -> None:
        management = Management("down", False, "answer lost", 60.0, True)
        outbox = ReportQueue(management.observe, "gateway", Path("unused"))
        news = iter("ab")
        outbox.sources["trials"] = lambda: next(news, None)
        for error in (ConnectionError, None, ConnectionError, asyncio.TimeoutError):
            if error is None:
                assert not await outbox.send_pending(1)
            else:
                with pytest.raises(error):
                    await outbox.send_pending(0.05)
        assert await outbox.send_pending(1)
        assert management.received == [1] * 5
        assert management.counted == {1: {"trials": "a"}}
        assert await outbox.send_pending(1)
        assert management.counted == {1: {"trials": "a"}, 2: {"trials": "b"}}

    asyncio.run(main())


def test_a_process_that_ends_says_what_waits_and_what_is_new() -> None:
    async def main() -> None:
        management = Management("down")
        outbox = ReportQueue(management.observe, "gateway", Path("unused"))
        news = iter("ab")
        outbox.sources["trials"] = lambda: next(news, None)
        with pytest.raises(ConnectionError):
            await outbox.send_pending(1)
        await outbox.drain(1)
        assert management.counted == {1: {"trials": "a"}, 2: {"trials": "b"}}

    asyncio.run(main())


def test_it_is_pushed_again_and_again_by_itself() -> None:
    async def main() -> None:
        management = Management("down", "down")
        outbox = ReportQueue(management.observe, "gateway", Path("unused"))
        news = iter("a")
        outbox.sources["trials"] = lambda: next(news, None)
        pushing = asyncio.create_task(outbox.push())

        async def counted() -> None:
            while not management.counted:
                await asyncio.sleep(0.01)

        await asyncio.wait_for(counted(), 60)
        pushing.cancel()
        assert management.received == [1, 1, 1]

    asyncio.run(main())


def test_an_answer_that_cannot_be_applied_does_not_end_the_poll() -> None:
    """The routing table would stay as it is for ever."""

    class Handle:
        """Ray's handle of Management, with a broken and a good answer."""

        def __init__(self) -> None:
            table = RoutingTable(7, {})
            self.answers = [b"no pickle", pickle.dumps(table)]
            self.poll = self

        async def remote(self, source: str, generation: int, samples: Any) -> Any:
            return self.answers.pop(0) if self.answers else await asyncio.Event().wait()

    async def main() -> None:
        client = object.__new__(ManagementClient)  # its constructor needs a Ray cluster
        client.before_report = client.on_connect = lambda: None
        client.key_limiter, client._source, client.management = None, "gateway", Handle()
        client._reader, client._meters = RoutingTableReader(RoutingTable()), Meters()
        client._descriptors = DescriptorCheck()
        polling = asyncio.ensure_future(client._poll())
        await asyncio.wait_for(client._reader.changed.wait(), 30)
        assert client._reader.table.generation == 7
        polling.cancel()

    asyncio.run(main())
