"""The example of a sharded model does what its page says, on a real server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from tests.support.load import Pulse
from tests.support.server import ROOT, Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_12_sharded(server: Server, run: Callable[..., str]) -> None:
    trained = run("12_sharded/archive.py", "--model-store", str(server.store))
    with Pulse() as pulse:
        began = time.monotonic()
        printed = run("12_sharded/run.py")
        stood = pulse.stalled_seconds(began)
    rhyme = "Twinkle, twinkle, little star, how I wonder what you are."
    reported, cut, reported_again = re.findall(r"^Twinkle.*$", printed, re.MULTILINE)
    assert reported == reported_again == rhyme, "learnt, and the same after the kill"
    assert len(cut) < 200 and f"{rhyme} {rhyme} {rhyme}".startswith(cut[:40]), "it streamed until the kill"
    whole = int(re.search(r"^([\d,]+) parameters", trained)[1].replace(",", ""))
    held = [int(number.replace(",", "")) for number in re.findall(r"holds ([\d,]+) parameters", printed)]
    assert held == [pytest.approx(whole / 2, rel=0.02)] * 4
    [error] = re.findall(r"^the stream broke off after ([\d.]+) s", printed, re.MULTILINE)
    [again] = re.findall(r"^answered again after ([\d.]+) s", printed, re.MULTILINE)
    assert float(error) - stood < 5 and float(again) - stood < 20
    page = (ROOT / "examples/12_sharded/README.md").read_text()
    assert rhyme in page and f"{whole:,} parameters" in page and f"holds {held[0]:,} parameters" in page
