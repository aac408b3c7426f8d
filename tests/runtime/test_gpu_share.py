"""A replica that has a part of a GPU keeps to that part of its memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from handlers.loading import device
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.errors import HandlerOutOfMemory

HANDLER = """
import torch
def handle(data, context):
    if data is None:
        return None
    torch.empty(int(data[0]["body"]), dtype=torch.uint8, device="cuda")
    return ["allocated"]
"""
Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("num_gpus", "gpu_id", "capped"), [(0.25, 0, [(0.2187, 0)]), (1.0, 0, []), (2.0, 0, []), (0.25, None, [])]
)
def test_only_a_part_is_capped(
    make_runner: Make, monkeypatch: pytest.MonkeyPatch, num_gpus: float, gpu_id: int | None, capped: list[Any]
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(device, "_budget", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *result: reported.append(result)
    )
    make_runner(HANDLER, num_gpus=num_gpus, gpu_id=gpu_id).load()
    assert reported == capped


@pytest.mark.gpu
def test_more_than_the_part_runs_out_of_memory(make_runner: Make) -> None:
    part = make_runner(HANDLER, num_gpus=0.05, gpu_id=0)
    part.load()
    whole = torch.cuda.get_device_properties(0).total_memory
    small, large = (
        InferenceRequest("m", inputs=(InputPart("body", b"%d" % size),))
        for size in (whole // 100, whole // 10)
    )
    assert part.run([small], lambda *_: None)[0].body == b"allocated"
    assert isinstance(part.run([large], lambda *_: None)[0], HandlerOutOfMemory)
