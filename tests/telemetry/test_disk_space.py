"""The measured disks of folders: real ones, and those of other sizes."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import pytest

from serve_app.telemetry.disk_space import DiskSpace
from serve_app.telemetry.metrics import Meters


def measure(space: DiskSpace, meters: Meters) -> dict[str, float]:
    asyncio.run(space.measure())
    return {labels[0]: gauge.value for labels, gauge in meters.instruments("torchrelay_disk_used_ratio")}


def test_the_share_is_that_of_df_and_a_missing_folder_has_none(tmp_path: Path) -> None:
    meters = Meters()
    space = DiskSpace({"state_dir": tmp_path, "log_dir": tmp_path / "absent"}, meters)
    [(name, share)] = measure(space, meters).items()
    assert name == "state_dir" and 0 < share < 1


def test_little_space_is_logged_once_until_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    meters, usage = Meters(), type(shutil.disk_usage(tmp_path))
    space = DiskSpace({"state_dir": tmp_path}, meters)
    logged = []
    for used in (90, 96, 99, 92, 97, 80, 95):
        now = usage(200 << 20, used << 20, (100 - used) << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, now=now: now)
        caplog.clear()
        assert measure(space, meters) == {"state_dir": used / 100}
        logged.append(len(caplog.records))
    assert logged == [0, 1, 0, 0, 0, 0, 1]
    assert f"state_dir ({tmp_path}) is 95 % full, and 5 MiB are left" in caplog.text
