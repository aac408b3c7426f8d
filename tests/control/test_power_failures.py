"""Power failures at random writes: what was acknowledged is on the disk, with the files that it names."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from serve_app.control.registry import Registry
from tests.support.killed_server import Stored, load, lost_changes, make_archives, run_until_killed
from tests.support.power_failure import fail_power, record_calls

pytestmark = pytest.mark.slow

FAILURES = 8


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_power_failures_lose_no_acknowledged_change(tmp_path: Path) -> None:
    home, record = tmp_path / "home", tmp_path / "calls"
    home.mkdir()
    make_archives(home)
    acknowledged, count, lost = Stored(Registry()), 0, []
    for seed in range(FAILURES):
        recorders: list[subprocess.Popen[bytes]] = []
        with_record = partial(record_calls, record=record, recorders=recorders)
        for state in run_until_killed(home, seed, with_record):
            acknowledged = state
            count += 1
        recorders[0].communicate()  # it has written all calls
        copy = tmp_path / f"after-{seed}"
        lost += fail_power(record, home, copy)
        changed = lost_changes(acknowledged, load(copy))
        assert len(changed) <= 1, f"seed {seed}: {sorted(changed)}"  # the change in progress is stored or not
        for spec in acknowledged.registry:
            kept = list(copy.glob(f"state/**/*{spec.digest[:12]}*"))
            assert kept, f"seed {seed}: the archive of {spec.ref} is not on the disk"
        acknowledged = load(home)
    assert count > FAILURES, count
    assert lost  # as the shared memory of SQLite's log, or what was being written
