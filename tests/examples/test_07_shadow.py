"""The example of a shadow does what its page says, on a real server."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_07_shadow(server: Server, run: Callable[..., str]) -> None:
    printed = run("07_shadow/archive.py", "--model-store", str(server.store))
    whole, small, _ = (float(right) for right in re.findall(r"has not seen ([\d.]+),", printed))
    assert whole - small < 0.02, "by its accuracy alone the small one is as good"

    before = read_counters(server)  # other tests of the server may have run the example
    printed = run("07_shadow/run.py")
    good, bad = printed.split("\nPUT ")[1:]
    for part in (good, bad):
        assert "360 requests were answered: 360 by 1.0 with status 200\n" in part
    together, agree, flips = re.search(
        r"shadow 2\.0: (\d+) compared, 0 errors\n +([\d.]+) % agree; (\d+) flips", good
    ).groups()
    assert int(together) == 360
    assert 0 < int(flips) < 20
    assert float(agree) == pytest.approx(100 - int(flips) / 3.6, abs=0.06)
    live, shadow = (
        re.search(rf"^    {version}: (\d) ", good, re.MULTILINE)[1] for version in (r"1\.0", r"2\.0")
    )
    assert live != shadow, "the worst is a flip, and its input stands above it"
    assert "##" in good
    assert "shadow 3.0: 0 compared, 360 errors {'handler_failed': 360}" in bad

    counted = {name: value - before[name] for name, value in read_counters(server).items()}
    assert counted == {
        "agreed": 360 - int(flips),
        "error": 360,
        "dropped": 0,
        "flips": int(flips),
        "answered by a shadow": 0,
    }


def read_counters(server: Server) -> dict[str, float]:
    def count(name: str, **labels: str) -> float:
        return server.metric(f"torchrelay_{name}", model="scribble", **labels)

    counters = {
        outcome: count("shadow_requests_total", outcome=outcome) for outcome in ("agreed", "error", "dropped")
    }
    counters["flips"] = count("shadow_label_flips_total")
    counters["answered by a shadow"] = sum(count("requests_total", version=v) for v in ("2.0", "3.0"))
    return counters
