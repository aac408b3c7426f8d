"""Host metrics, collected by one process of a node."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.telemetry.host_metrics import HostMetrics
from serve_app.telemetry.torchserve.recorders import TorchServeRecorders

HOST = socket.gethostname()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_one_process_of_a_node_measures_and_another_takes_over(tmp_path: Path) -> None:
    processes = [TorchServeRecorders(), TorchServeRecorders()]
    first = HostMetrics(processes[0], 0.02, tmp_path / "state" / "node")

    def measured(meters: TorchServeRecorders) -> dict[str, float]:
        return {sample.family.name: sample.number for sample in meters.samples() if sample.values[-1] == HOST}

    until(lambda: "DiskAvailable" in measured(processes[0]))
    second = HostMetrics(processes[1], 0.02, tmp_path / "state" / "node")
    try:
        before = processes[0].samples()[0].time
        until(lambda: processes[0].samples()[0].time > before)
        assert not measured(processes[1]), "one is enough"
        first.close()
        until(lambda: "DiskAvailable" in measured(processes[1]))
        assert 0 < measured(processes[1])["MemoryUtilization"] <= 100
    finally:
        second.close()


def test_failed_collection_is_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    blocked = tmp_path / "file"
    blocked.write_text("")
    meters = TorchServeRecorders()
    host_metrics = HostMetrics(meters, 0.01, blocked / "node")  # a file stands where its folder should be
    until(lambda: caplog.text.count("could not be collected") > 1)
    host_metrics.close()
    assert meters.samples() == []
