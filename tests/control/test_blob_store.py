"""The store of large asynchronous predictions in a folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serve_app.control.async_predictions.blob_store import BlobStore
from serve_app.settings import load
from tests.support.disk_calls import DiskCalls


def test_an_accepted_object_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is created with the first object."""
    folder = tmp_path / "results"
    store = BlobStore(load({"home": str(tmp_path), "async_predictions": {"results": str(folder)}}))
    calls = DiskCalls.record(monkeypatch)
    asyncio.run(store.write("object", b"a", b"b"))
    assert (folder / "object").read_bytes() == b"ab"
    calls.check_durable(folder / "object")
    store.close()
    assert tmp_path.stat().st_ino in {call.inode for call in calls if call.kind == "sync"}
