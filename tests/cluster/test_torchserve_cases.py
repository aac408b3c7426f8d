"""Cases of what authors' archives do: the answers are TorchServe's, as they were recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.server import Server
from tests.torchserve_cases.case import ANSWERS, Case, run_case
from tests.torchserve_cases.catalogue import CASES
from tests.torchserve_cases.value_cases import RETURN_CASES

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RECORDED = json.loads(ANSWERS.read_text())
# A pool loads a version in 0.1 s, its own replica takes 2 s.
POOLED = {case.name for case in RETURN_CASES if case.config is None}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_answers_are_those_of_torchserve(server: Server, tmp_path: Path, case: Case) -> None:
    if case.name in POOLED:
        case = replace(case, config={"torchrelay": {"pool": "p"}})
    registration = server.register(case.make_archive(tmp_path), synchronous="true", **case.parameters)
    try:
        found = run_case(case, server.url, registration)
    finally:
        server.management.delete(f"/models/{case.name}")
    if case.difference:
        assert found != RECORDED[case.name], f"{case.name} does not differ any more; remove its reason"
    else:
        assert found == RECORDED[case.name], registration.text[:2000]


def test_every_case_is_recorded() -> None:
    assert RECORDED.keys() == {case.name for case in CASES}
