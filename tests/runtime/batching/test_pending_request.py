"""What is kept of a streamed answer for a caller who reads slowly."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.errors import CallerTooSlow
from serve_app.runtime.answer import Pieces


def test_a_caller_who_falls_too_far_behind_is_told_and_nothing_is_kept() -> None:
    async def read() -> tuple[list[bytes], list[str]]:
        left: list[str] = []
        pieces = Pieces(lambda: left.append("left"), unread=10)
        got = []
        for _ in range(5):  # as fast as they come, however many
            pieces.put(b"12345678")
            got.append(await pieces.__anext__())
        pieces.put(b"12345678")
        pieces.put(b"123")
        assert left == ["left"], "whoever makes them is told to stop"
        pieces.put(b"more")
        with pytest.raises(CallerTooSlow, match="more than 10 bytes behind"):
            await pieces.__anext__()
        with pytest.raises(StopAsyncIteration):
            await pieces.__anext__()
        return got, left

    got, left = asyncio.run(read())
    assert got == [b"12345678"] * 5
    assert left == ["left"]
