"""The board: tables reach every reader, and a change counts as in force when they all have it."""

from __future__ import annotations

import asyncio

from serve_app.control.board import Board
from serve_app.telemetry.metrics import Meters, Sum
from serve_app.types import Access, Table


async def nobody() -> set[str]:
    return set()


def everybody(*sources: str):
    async def alive() -> set[str]:
        return set(sources)

    return alive


class Reader:
    """A reader as deployments/link.py is one, on the same event loop."""

    def __init__(self, board: Board, source: str) -> None:
        self.board, self.source, self.meters, self.table = board, source, Meters(), Table()
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        samples = self.meters.report()
        while True:
            answer = await self.board.poll(self.source, self.table.generation, samples)
            samples = self.meters.report() if answer == "samples" else None
            if isinstance(answer, Table):
                self.table = answer


def test_a_change_is_in_force_when_every_reader_has_it() -> None:
    async def main() -> None:
        board = Board(Sum())
        readers = [Reader(board, str(i)) for i in range(5)]
        await asyncio.sleep(0)
        for _ in range(20):
            board.hang(Table(board.next_generation()))
            assert await board.in_force(1.0, everybody("0", "1", "2", "3", "4")) == []
            assert {r.table.generation for r in readers} == {board.table.generation}
        for reader in readers:
            reader.task.cancel()

    asyncio.run(main())


def test_a_reader_that_was_killed_holds_nobody_up() -> None:
    async def main() -> None:
        board = Board(Sum())
        living, dead = Reader(board, "living"), Reader(board, "dead")
        await asyncio.sleep(0)
        dead.task.cancel()
        board.hang(Table(board.next_generation()))
        started = asyncio.get_running_loop().time()
        assert await board.in_force(5.0, everybody("living")) == []
        assert asyncio.get_running_loop().time() - started < 2.0
        living.task.cancel()

    asyncio.run(main())


def test_a_live_reader_that_lags_is_named() -> None:
    async def main() -> None:
        board = Board(Sum())
        slow = asyncio.create_task(board.poll("slow", 0, Meters().report()))
        await asyncio.sleep(0)
        board.hang(Table(board.next_generation()))
        assert await board.in_force(0.1, everybody("slow")) == ["slow"]
        await slow

    asyncio.run(main())


def test_readers_of_a_board_that_crashed_are_waited_for() -> None:
    async def main() -> None:
        board = Board(Sum())
        board.expect({"back", "gone"})
        board.hang(Table(board.next_generation()))
        change = asyncio.create_task(board.in_force(5.0, everybody("back")))
        await asyncio.sleep(0)
        assert not change.done(), "nobody has the table yet"
        back = Reader(board, "back")
        assert await change == []
        assert back.table == board.table
        back.task.cancel()

    asyncio.run(main())


def test_samples_are_collected_from_all_and_outlive_their_reader() -> None:
    async def main() -> None:
        total = Sum()
        board = Board(total)
        readers = [Reader(board, str(i)) for i in range(3)]
        await asyncio.sleep(0)
        for reader in readers:
            reader.meters.request("m", "1.0", "ok", 0.01)
            reader.meters.depth("m", "1.0", 2)
        await board.collect(1.0, everybody("0", "1", "2"))
        assert total.total("torchrelay_requests_total", model="m", status="ok") == 3
        assert total.total("torchrelay_queue_depth", model="m") == 6
        readers[0].task.cancel()
        board.leave("0")
        assert total.total("torchrelay_requests_total", model="m") == 3, "what it counted stays counted"
        assert total.total("torchrelay_queue_depth", model="m") == 4, "what it held is gone"
        for reader in readers:
            reader.task.cancel()

    asyncio.run(main())


def test_generations_go_up_even_when_a_reader_knows_a_later_one() -> None:
    async def main() -> None:
        board = Board(Sum(), patience=0.05)
        board.hang(Table(10, access=Access({})))
        answer = await board.poll("r", 10**18, None)
        assert isinstance(answer, Table) and answer.generation > 10**18
        assert answer.access == Access({}), "a door that wants keys goes on wanting them"
        assert board.next_generation() > 10**18

    asyncio.run(main())


def test_a_poll_ends_after_its_patience_with_a_wish_for_samples() -> None:
    async def main() -> None:
        board = Board(Sum(), patience=0.05)
        assert await board.poll("r", 0, None) == "samples"

    asyncio.run(main())
