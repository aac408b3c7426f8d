"""The loop that updates gauges goes on after an error, and slows down where updates are expensive."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.control.gauge_export import export_periodically


def test_an_error_of_one_export_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("serve_app.control.gauge_export._PERIOD", 0.0)

    async def run() -> None:
        exported, done = 0, asyncio.Event()

        async def fail() -> None:
            raise ValueError("no figures")

        async def export() -> None:
            nonlocal exported
            exported += 1
            if exported == 3:
                done.set()

        loop = asyncio.create_task(export_periodically(fail, export))
        await asyncio.wait_for(done.wait(), 60)
        loop.cancel()

    asyncio.run(run())
    assert "no figures" in caplog.text
