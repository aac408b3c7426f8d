"""What is kept of a streamed answer for a caller who reads slowly."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.errors import ClientTooSlow
from serve_app.runtime.batching.request_queue import StreamBuffer


def test_a_client_that_reads_too_slowly_gets_an_error_and_nothing_is_kept() -> None:
    async def read() -> tuple[list[bytes], list[str]]:
        left: list[str] = []
        pieces = StreamBuffer(lambda: left.append("left"), max_buffered=10)
        got = []
        for _ in range(5):  # as fast as they come, however many
            pieces.append(b"12345678")
            got.append(await pieces.__anext__())
        pieces.append(b"12345678")
        pieces.append(b"123")
        assert left == ["left"], "whoever makes them is told to stop"
        pieces.append(b"more")
        with pytest.raises(ClientTooSlow, match="more than 10 bytes behind"):
            await pieces.__anext__()
        with pytest.raises(StopAsyncIteration):
            await pieces.__anext__()
        return got, left

    got, left = asyncio.run(read())
    assert got == [b"12345678"] * 5
    assert left == ["left"]
