"""The comparison's tables and verdicts, from given results."""

from __future__ import annotations

import math

import pytest

from serve_app.load_test import LoadResult
from tests.benchmarks import report
from tests.benchmarks.report import Case, Footprint, Report, Target

pytestmark = pytest.mark.nightly


_MIB = 1 << 20


def result(rate: float, p50: float = 0.001, p99: float = 0.002, errors: int = 0) -> LoadResult:
    kinds = {"disconnect": errors} if errors else {}
    return LoadResult("wrk", 32, 2.0, int(rate * 2), int(rate * 2), p50, p50 * 1.5, p99, p99 * 2, kinds)


ECHO = Case("echo", 32)
FIGURES = {
    ECHO: {
        report.FASTAPI: [result(9000), result(9500), result(1000)],
        report.SERVE1: [result(1500, p99=0.03), result(1700, p99=0.04), result(1600, p99=0.05)],
        report.RELAY1: [result(5000, p99=0.05), result(5400, p99=0.06, errors=2), result(5200, p99=0.055)],
    },
    Case("costs", 32): {report.KEYLESS: [result(1000)], report.FULL: [result(990)]},
}


def row(text: str, *starts: str) -> list[str]:
    """Return the cells of the one row whose cells begin so."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    (found,) = [cells for cells in rows if cells[: len(starts)] == list(starts)]
    return found


def test_a_table_shows_the_median_and_the_spread_of_the_rounds():
    text = Report({"machine": "2 cores"}, "python -m it", FIGURES, targets=()).markdown()
    assert "`python -m it`" in text
    assert "- machine: 2 cores" in text
    assert "### echo" in text
    assert row(text, "32", "FastAPI")[2:4] == ["9,000", "1,000 to 9,500"]  # one disturbed round moves nothing
    assert row(text, "32", report.RELAY1) == [
        *("32", report.RELAY1, "5,200", "5,000 to 5,400", "1.00", "1.50", "55.00", "120.00", "2")
    ]


def test_every_row_of_a_table_has_as_many_cells_as_its_head():
    footprint = Footprint("TorchServe", ready=2.51, idle=200 * _MIB, counted="PSS", processes=3)
    text = Report({}, "c", FIGURES, [footprint], ["a note"]).markdown()
    for table in [part for part in text.split("\n\n") if part.startswith("|")]:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert row(text, "TorchServe") == ["TorchServe", "2.5", "-", "200", "-", "-", "PSS", "3", "-"]
    assert text.endswith("### Notes\n\n- a note\n")


@pytest.mark.parametrize(
    ("target", "ratio", "verdict"),
    [
        (Target(ECHO, report.RELAY1, report.SERVE1, "throughput", 3.0), 5200 / 1600, "reached"),
        (Target(ECHO, report.RELAY1, report.SERVE1, "throughput", 3.5), 5200 / 1600, "**not reached**"),
        (Target(ECHO, report.RELAY1, report.FASTAPI, "throughput", 0.5), 5400 / 9500, "reached"),
        (
            Target(ECHO, report.RELAY1, report.SERVE1, "p99", 1.25),
            0.06 / 0.04,
            "**not reached**",
        ),  # less is better
        (Target(ECHO, report.RELAY1, report.SERVE1, "p50", 1.0), 1.0, "reached"),
        (Target(ECHO, report.RELAY1, report.SERVE1, "p50"), 1.0, "-"),
        (Target(ECHO, report.RELAY2, report.SERVE1, "throughput", 1.0), math.nan, "not measured"),
        (Target(Case("mlp", 32), report.RELAY1, report.SERVE1, "throughput", 1.0), math.nan, "not measured"),
    ],
)
def test_a_target_is_the_median_of_the_rounds_ratios(target, ratio, verdict):
    assert target.ratio(FIGURES) == pytest.approx(ratio, nan_ok=True)
    assert target.verdict(FIGURES) == verdict


def test_a_machine_that_slows_down_between_rounds_moves_no_target():
    target = Target(ECHO, report.RELAY1, report.SERVE1, "throughput", 0.9)
    speeds = (4000, 2000, 2000, 4000)
    theirs, ours = ([result(share * speed) for speed in speeds] for share in (1.0, 0.9))
    figures = {ECHO: {report.SERVE1: theirs, report.RELAY1: ours}}
    assert (target.ratio(figures), target.of_medians(figures)) == pytest.approx((0.9, 0.9))
    ours[0] = result(0.9 * 2000)  # the machine slowed down in the middle of the round
    assert target.ratio(figures) == pytest.approx(0.9)
    assert target.of_medians(figures) == pytest.approx(0.6)
    assert "| 0.90 | 0.60 |" in Report({}, "c", figures, targets=(target,)).markdown()
    del ours[0]
    assert target.ratio(figures) == target.of_medians(figures)


def test_the_report_says_of_every_target_what_became_of_it():
    text = Report({}, "c", FIGURES).markdown()
    rows = text.partition("### Targets")[2].splitlines()
    verdicts = [row.rsplit("|", 2)[1].strip() for row in rows if row.startswith("| ") and "*" in row]
    assert len(verdicts) == len(report.TARGETS)
    assert "reached" in verdicts
    assert "**not reached**" in verdicts
    assert "not measured" in verdicts


def test_the_cpu_time_of_a_request_is_shown_by_part():
    cpu = {ECHO: {report.RELAY1: [{"HAProxy": 2e-5, "replica": 1e-4}, {"HAProxy": 4e-5, "replica": 1.2e-4}]}}
    text = Report({}, "c", FIGURES, cpu=cpu, targets=()).markdown()
    assert row(text, "connections", "", "all")[3:] == ["HAProxy", "gateway", "replica", "other"]
    assert "| 32 | Torchrelay, 1 replica | 140 | 30 | - | 110 | - |" in text


def test_a_contender_that_never_answered_is_a_dash():
    nan = math.nan
    dead = LoadResult("wrk", 32, 5.0, 0, 0, nan, nan, nan, nan, {"connect": 7})
    text = Report({}, "c", {ECHO: {report.RELAY1: [dead], report.SERVE1: [result(10)]}}).markdown()
    assert row(text, "32", report.RELAY1) == ["32", report.RELAY1, "0", "-", "-", "-", "-", "-", "7"]


def test_what_has_no_connections_is_counted_in_its_own_unit_with_its_mean_latency():
    def generated(seconds: float, mean: float) -> LoadResult:
        return LoadResult("loop", 0, seconds, 16, 400, 1.0, 2.0, 3.0, 4.0, mean=mean)

    figures = {
        Case("generation"): {report.TOGETHER: [generated(4, 4.0)], report.CONTINUOUS: [generated(2, 1.5)]}
    }
    text = Report({}, "c", figures).markdown()
    assert row(text, "connections")[2:5] == ["tokens/s", "of the rounds", "mean ms"]
    assert row(text, "-", report.CONTINUOUS)[2:5] == ["200", "-", "1500.00"]
    target = f"generation: mean of *{report.CONTINUOUS}* ≤ 0.5 × *{report.TOGETHER}*"
    assert row(text, target) == [target, "0.38", "0.38", "reached"]
