"""The A/B test ends when it is known which version readers prefer, and its A/A test sees nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.server import ROOT, Server

EXAMPLE = ROOT / "examples/05_ab_test"
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_05_ab_test(server: Server, run: Callable[..., str]) -> None:
    run("05_ab_test/archive.py", "--model-store", str(server.store))
    printed = run("05_ab_test/run.py")
    counted = re.search(
        r"^POST /experiments/\w+/events: {'counted': (\d+), 'repeated': 0}$", printed, re.MULTILINE
    )
    assert f"the same again: {{'counted': 0, 'repeated': {counted[1]}}}" in printed
    looks = re.findall(
        r"^ *([\d,]+) readers: clicks popular [\d.]+, personal [\d.]+: (.*)$", printed, re.MULTILINE
    )
    assert [verdict for _, verdict in looks] == ["not yet known"] * (len(looks) - 1) + ["better"]
    page = (EXAMPLE / "README.md").read_text()
    assert all(line in page for line in re.findall(r"^ *[\d,]+ readers: .*$", printed, re.M)), (
        "as the page says"
    )
    assert "50 of 50 readers who came again were given the version that they had" in printed
    assert re.search(
        r"^personal is better than popular on clicks: 0\.0\d+ more, ± 0\.0\d+ \(95 %\)", printed, re.M
    )
    assert "The arms' sizes fit their weights" in printed
    assert "looked at 8 times: no difference was taken for one" in printed
    assert printed.count("stopped") == 2
    assert not [
        e for e in server.client.experiments() if e["model"] == "headlines" and e["state"] == "running"
    ]
