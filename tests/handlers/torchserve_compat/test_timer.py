"""Tests of the times of a handler's stages."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import handlers
from handlers.context import Context
from handlers.torchserve_compat.timer import timeit

MODEL = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x
"""


class MetricRecorder:
    """Metrics that record the names of times."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add_time(self, name: str, value: float, idx: Any = None, unit: str = "ms") -> None:
        assert value >= 0 and unit == "ms"
        self.names.append(name)


@pytest.mark.parametrize(
    ("options", "is_timed"), [({"profile": True}, True), ({"profile": False}, False), (None, False)]
)
@pytest.mark.parametrize("micro_batching", [None, {"micro_batch_size": 1}])
def test_stages_are_timed_if_configured(
    archive: Any, begin: Any, options: Any, is_timed: bool, micro_batching: Any
) -> None:
    directory, manifest = archive(model=MODEL), {"model": {"modelFile": "model.py"}}
    config = {"handler": options, "micro_batching": micro_batching}
    context = Context("m", str(directory), manifest, metrics=MetricRecorder(), model_yaml_config=config)
    entry = handlers.load("base_handler", directory, manifest)
    entry.initialize(context)
    rows = [{"body": [1.0]}, {"body": [2.0]}]
    assert entry(rows, begin(context, 2)) == [[1.0], [2.0]]
    if micro_batching:
        entry.handle.shutdown()
    stages = ["ts_handler_preprocess", "ts_handler_inference", "ts_handler_postprocess"]
    expected = stages * (2 if micro_batching else 1) if is_timed else []
    assert sorted(context.metrics.names) == sorted([*expected, "HandlerTime"])


def test_timeit_logs_the_time(caplog: pytest.LogCaptureFixture) -> None:
    @timeit
    def double(value: int) -> int:
        return value * 2

    with caplog.at_level(logging.INFO, "handlers.torchserve_compat.timer"):
        assert double(2) == 4
    assert "double took" in caplog.text and "CPU" in caplog.text
