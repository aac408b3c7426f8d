"""The simulation of the control plane applies its changes at every node."""

from __future__ import annotations

from tests.benchmarks.control_plane import simulate


def test_changes_reach_all_nodes_as_differences() -> None:
    timings = simulate(versions=50, nodes=3)
    assert len(timings.seconds["change: commit until all nodes apply it"]) == 10
    assert 0 < timings.delta_bytes < timings.table_bytes / 5
