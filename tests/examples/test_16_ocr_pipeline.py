"""The example of a workflow reads what was drawn, line by line through three models, on a real server."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from tests.support.server import ROOT, Server

EXAMPLE = ROOT / "examples/16_ocr_pipeline"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("nothing_stays", "no_workflow_stays"),
    pytest.mark.nightly,
]


@pytest.fixture
def no_workflow_stays(server: Server, nothing_stays: None) -> Iterator[None]:
    yield
    server.management.delete("/workflows/receipts")


def words(printed: str) -> str:
    """Return the output without scores and times, which differ between machines."""
    return re.sub(r"(?m)^  \d\.\d\d  | +[\d.]+ ms$", "", printed)


def test_16_ocr_pipeline(server: Server, run: Callable[..., str]) -> None:
    run("16_ocr_pipeline/archive.py", "--model-store", str(server.store))
    printed = run("16_ocr_pipeline/run.py")
    page = (EXAMPLE / "README.md").read_text()
    promised = re.search(r"run\.py\n(Workflow receipts.*?)```", page, re.DOTALL)
    assert promised is not None
    assert words(printed) == words(promised[1])

    # Several pictures at once: the lines of all of them share the batches of two of the models.
    drawn = runpy.run_path(str(ROOT / "examples/15_ocr/run.py"))
    receipt = drawn["draw_receipt"]()
    pictures = [receipt, drawn["tilt"](receipt), receipt.rotate(180), Image.new("RGB", (64, 64), "white")]
    bodies = [drawn["png"](picture) for picture in pictures] + [b"no picture"]
    with ThreadPoolExecutor(len(bodies)) as pool:
        result = list(pool.map(lambda body: server.http.post("/predictions/receipts", content=body), bodies))
    assert [answer.status_code for answer in result] == [200, 200, 200, 200, 400]
    whole, askew, upside_down, empty = (answer.json() for answer in result[:4])
    assert [line["text"] for line in whole] == [line["text"] for line in askew] == [*drawn["LINES"]]
    assert [line["text"] for line in upside_down] == [*reversed(drawn["LINES"])]
    assert empty == []
    assert result[4].json()["message"].startswith("Step detect of workflow receipts failed: ")
    rows = server.metric("torchrelay_batch_size_sum", model="ocr_reader")
    assert rows == 4 * len(drawn["LINES"]), "each line is one call, and one row"

    # None of its models can be taken away while it stands.
    refused = server.management.delete("/models/ocr_direction")
    assert refused.status_code == 409 and "the workflow receipts" in refused.json()["message"]
