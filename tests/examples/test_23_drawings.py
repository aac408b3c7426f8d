"""The detector of drawings is trained, served by a built-in handler, and its boxes are drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_23_drawings(server: Server, run, tmp_path: Path) -> None:
    printed = run("23_drawings/train.py", "--model-store", str(server.store))
    precision, recall = re.search(r"new drawings: ([\d.]+), ([\d.]+)", printed).groups()
    assert float(precision) > 0.8 and float(recall) > 0.8, printed
    assert server.management.post("/models", params={"url": "drawings.mar"}).status_code == 200
    picture = tmp_path / "detected.png"
    found = run("23_drawings/run.py", "--output", str(picture))
    assert re.search(r"^(figure|house|sun) +[01]\.\d\d at \[\d+, \d+, \d+, \d+\]$", found, re.MULTILINE), (
        found
    )
    with Image.open(picture) as drawn:
        assert drawn.size == (480, 480)
