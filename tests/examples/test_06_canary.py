"""The canary of the example against a real server: it rolls back by itself, and the good version takes
over.
"""

from __future__ import annotations

import re

import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_06_canary(server: Server, run) -> None:
    run("06_canary/archive.py", "--model-store", str(server.store))
    quick = (
        "--steps",
        "5,20,50,100",
        "--bake",
        "2",
        "--min-calls",
        "10",
        "--keep-warm",
        "1",
        "--rate",
        "250",
    )
    printed = run(
        "06_canary/run.py", *quick, "--p99", "100"
    )  # a machine that stalls is no fault of a version's
    assert re.findall(r"^  (yes|NO )  (.*?)(?:\d+ requests)?$", printed, re.MULTILINE) == [
        ("yes", "2.0 went back by itself"),
        ("yes", "2.0 failed "),
        ("yes", "no call failed but these"),
        ("yes", "3.0 took over"),
        ("yes", "no call has failed since 2.0 went back"),
        ("yes", "3.0 answers every call"),
    ], printed
    guardrail = (
        r"error_rate [\d.]+ % of \d+ requests against 0 % of [\d,]+.*; at most 1 % more is allowed \(surely"
    )
    assert re.search(guardrail, printed), printed
    log = server.process.log.read_text(errors="replace")
    [result] = [line for line in log.splitlines() if "estimate: 2.0 rolled back at " in line]
    assert re.search(guardrail, result)
    routes = server.http.get("/-/routes").json()
    assert routes["/predictions/estimate"] == "estimate--3.0", "the new default is on the fast path"

    def cooled() -> bool:
        return server.client.rollout("estimate")["decisions"][-1]["verdict"] == "scaled_down"

    server.wait(cooled, description="the end of the old version's workers")
    assert server.workers("estimate", "1.0") == []
