"""The figures of a chaos run and of a soak: unavailability, exact counts, verdicts and slopes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.chaos_server import ChaosServer
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.load import Outcome, failures, unavailable_seconds
from tests.chaos.report import markdown
from tests.chaos.run import Result, allowed_counts, judge, was_replaced
from tests.chaos.soak import Sample, Soak, actor_type, hourly_growth, theil_sen
from tests.chaos.soak import judge as judge_soak

FAULT = Fault("kill HAProxy", "default", lambda setup: None, unavailable=2.0)


def outcomes(*kinds: str, stream: str = "http", arm: str = "") -> list[Outcome]:
    """Return one outcome a second."""
    return [Outcome(stream, float(due), kind, 0.1, arm) for due, kind in enumerate(kinds)]


def test_a_stream_is_unavailable_from_a_failure_to_the_next_answer() -> None:
    assert unavailable_seconds(outcomes("ok", "ok", "ok")) == 0
    assert unavailable_seconds(outcomes("ok", "connect", "timeout", "ok", "connect", "ok")) == 2
    assert unavailable_seconds(outcomes("ok", "connect", "connect")) == 1  # to its last request


def test_streams_are_unavailable_each_by_itself() -> None:
    other = outcomes("ok", "ok", "ok", "ok", stream="grpc")
    assert unavailable_seconds([*other, *outcomes("connect", "connect", "connect", "ok")]) == 3


def test_failures_are_counted_by_stream_and_kind() -> None:
    assert failures(outcomes("ok", "status 503", "status 503", "connect")) == {
        "http: connect": 1,
        "http: status 503": 2,
    }


@pytest.mark.parametrize("kind", ["status 404", "body", "grpc NOT_FOUND"])
def test_a_wrong_response_for_a_model_that_exists_fails(kind: str) -> None:
    result = Result("f", failed={f"http: {kind}": 1}, acknowledged=1)
    assert "wrong responses" in judge(result, FAULT, (0, 0))[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lost": ["change-1"]}, "acknowledged changes lost: change-1"),
        ({"counted": 9}, "experiment counted 9 of 10 to 12"),
        ({"counted": 13}, "experiment counted 13 of 10 to 12"),
        ({"recovery": 30.1}, "recovery took 30.1 s"),
        ({"unavailable": 2.1}, "unavailable for 2.1 s, limit 2 s"),
        ({"slowest_change": 26.0}, "a change was answered after 26.0 s"),
        ({"acknowledged": 0}, "no change was acknowledged"),
        ({"refused": {"register: status 500": 2}}, "refused without a reason: {'register: status 500': 2}"),
    ],
)
def test_every_documented_limit_is_checked(change: dict[str, object], problem: str) -> None:
    good = {"acknowledged": 1, "counted": 10}
    assert judge(Result("f", **good), FAULT, (10, 12)) == []  # type: ignore[arg-type]
    [found] = judge(Result("f", **{**good, **change}), FAULT, (10, 12))  # type: ignore[arg-type]
    assert problem in found


def test_requests_without_a_response_may_have_been_counted() -> None:
    answered = outcomes("ok", "ok", "status 503", stream="gateway", arm="id/a")
    lost = outcomes("timeout", "disconnect", stream="gateway")
    assert allowed_counts([*answered, *lost, *outcomes("ok")]) == (3, 5)


def test_the_table_has_the_worst_figures_of_a_fault_and_its_problems() -> None:
    runs = [
        Result("kill HAProxy", unavailable=1.5, requests=10, acknowledged=3),
        Result("kill HAProxy", unavailable=4.7, requests=10, failed={"http: connect": 2}, problems=["late"]),
    ]
    table = markdown(runs, {"full disk": "not root"}, {"default": ["haproxy (7)"]})
    assert (
        "| kill HAProxy | 2 | 4.70 | 2 of 20 (2 http: connect) | 0.0 | 3 / 0 | 0 / 0 | **failed** |" in table
    )
    assert "skipped: not root" in table
    assert "default: haproxy (7)" in table
    assert "* kill HAProxy: late" in table


def test_faults_have_names_of_their_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)


def test_a_server_between_two_runs_has_not_replaced_its_process(tmp_path: Path) -> None:
    server = ChaosServer(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state/server.run").write_text(f"run {2**22 + 1}")  # above the greatest process id
    [fault] = [fault for fault in FAULTS if fault.name == "kill supervisor"]
    assert not was_replaced(server, fault, old=set())
    server.client.close()
    server.http.close()
    server.management.close()


@pytest.mark.parametrize(
    ("title", "type"),
    [
        ("ray::ServeReplica:echo--1.0:echo--1.0", "replica"),
        ("ray::ServeReplica:cycled--1.0:cycled--1.0", "cycled"),
        ("ray::SERVE_REPLICA::cycled--1.0#cycled--1.0#x7:Model.__init__", "cycled"),
        ("ray::ServeReplica:torchrelay:Gateway", "Gateway"),
        ("ray::ServeController.listen_for_change", "ServeController"),
        ("ray::IDLE", "IDLE"),
    ],
)
def test_samples_are_grouped_by_the_type_of_the_process(title: str, type: str) -> None:
    assert actor_type(title) == type


def test_the_slope_ignores_single_samples_and_the_warm_up() -> None:
    points = [(float(x), 2.0 * x) for x in range(20)]
    points[7] = (7.0, 1000.0)
    assert theil_sen(points) == 2.0
    settled = [(float(x), 500.0 if x < 5 else 600.0) for x in range(20)]
    assert hourly_growth(settled) == 0.0


def test_a_process_type_that_grows_faster_than_its_bound_fails() -> None:
    def samples(type: str, growth: float) -> list[Sample]:
        return [Sample(60.0 * n, type, 1, 100 + growth * n / 60, 50, 20) for n in range(20)]

    soak = Soak(samples=[*samples("Management", 20.0), *samples("Gateway", 30.0)], database=[(0.0, 1.0)])
    _, problems = judge_soak(soak)
    assert problems == ["Gateway: uss grows by 30.0 an hour (24.0)"]
