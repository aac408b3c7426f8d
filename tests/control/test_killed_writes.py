"""A server that is killed at random writes: the next start has every acknowledged change."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.control.registry import Registry
from tests.support.killed_server import Stored, load, lost_changes, make_archives, run_until_killed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kills", [10, pytest.param(1000, marks=pytest.mark.nightly)])
def test_kills_at_random_writes_lose_no_acknowledged_change(tmp_path: Path, kills: int) -> None:
    make_archives(tmp_path)
    acknowledged = Stored(Registry())
    count, unacknowledged = 0, 0
    for seed in range(kills):
        for state in run_until_killed(tmp_path, seed):
            acknowledged = state
            count += 1
        stored = load(tmp_path)
        changed = lost_changes(acknowledged, stored)
        assert len(changed) <= 1, f"seed {seed}: {sorted(changed)}"  # the change in progress is stored or not
        unacknowledged += bool(changed)
        acknowledged = stored
    assert count > kills, count
    assert unacknowledged > 0  # some kills came between the commit and the acknowledgement
    print(f"{kills} kills, {count} acknowledged changes, {unacknowledged} stored without acknowledgement")
