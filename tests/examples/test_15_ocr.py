"""The example of OCR reads what was drawn, askew and upside down too, many pictures at once, on a real
server.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.server import ROOT, Server

EXAMPLE = ROOT / "examples/15_ocr"
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_15_ocr(server: Server, run: Callable[..., str]) -> None:
    run("15_ocr/archive.py", "--model-store", str(server.store))
    answer = server.management.post("/models?url=ocr.mar&initial_workers=1")
    assert answer.status_code == 200, answer.text

    printed = run("15_ocr/run.py")
    page = (EXAMPLE / "README.md").read_text()
    promised = re.search(r"run\.py\n(as it is:\n.*?)```", page, re.DOTALL)
    assert promised is not None
    assert _words(printed) == _words(promised[1])

    drawn = _module("run")
    receipt = drawn.draw_receipt()
    pictures = [receipt, drawn.tilt(receipt), receipt.rotate(180), receipt.rotate(90, expand=True)]
    bodies = [drawn.png(picture) for picture in pictures] + [
        drawn.png(Image.new("RGB", (9, 3))),
        b"no picture",
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:  # one batch, or two
        result = list(pool.map(lambda body: server.http.post("/predictions/ocr", content=body), bodies))
    assert [answer.status_code for answer in result] == [200, 200, 200, 200, 200, 400]
    whole, askew, upside_down, on_its_side, empty = (answer.json() for answer in result[:5])
    assert [line["text"] for line in whole] == [line["text"] for line in askew] == [*drawn.LINES]
    assert [line["text"] for line in upside_down] == [*reversed(drawn.LINES)]
    assert {line["text"] for line in on_its_side} == {*drawn.LINES}
    assert empty == []
    assert all(line["score"] > 0.9 for line in whole + askew)
    dark = np.asarray(receipt.convert("L")) < 128
    for line in whole:
        left, top, right, bottom = _around(line)
        assert dark[top:bottom, left:right].any()
        dark[top:bottom, left:right] = False
    assert not dark.any(), "no letter lies outside of the boxes"


def _around(line: dict[str, Any]) -> tuple[int, int, int, int]:
    corners = np.array(line["box"])
    return (*corners.min(0).tolist(), *(corners.max(0) + 1).tolist())


def _words(printed: str) -> list[str]:
    """Return the output without scores and places, whose last digit differs between processors."""
    return [re.sub(r"^  \d\.\d\d  |  +from .*", "", line) for line in printed.splitlines()]


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ocr_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
