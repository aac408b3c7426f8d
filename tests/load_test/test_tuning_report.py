"""The report of a tuning run."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.load_test.candidate import Candidate, SearchSpace
from serve_app.load_test.rate_search import LoadStep
from serve_app.load_test.trials import Trial
from serve_app.load_test.tuner import CONCURRENCY
from serve_app.load_test.tuning_report import TuningResult, write_output
from serve_app.load_test.tuning_search import SearchBudget, TuningSearch
from tests.support.report_checks import ReportPage
from tests.support.simulated_server import SimulatedServer

HOSTILE = "</script><b>model"
SPACE = SearchSpace(2, ("plain", "int8"), max_workers=2, max_batch_size=8, limit=0.02)
VARIANTS = {
    "variants": [
        {
            "name": "plain",
            "largest": 0.0,
            "cosine": 1.0,
            "mib": 4.0,
            "ms": {"1": 2.0, "8": 9.0},
            "outside": "",
        },
        {
            "name": "int8",
            "largest": 0.003,
            "cosine": 0.9991,
            "mib": 1.0,
            "ms": {"1": 1.0, "8": 5.0},
            "outside": "",
        },
        {
            "name": "bfloat16",
            "largest": None,
            "cosine": 0.0,
            "mib": 2.0,
            "ms": {"1": 3.0, "8": 9.9},
            "outside": "<i>",
        },
    ],
    "failed": {"onnx": "no <onnx>"},
}


def result(limit: float = 0.02, is_generation: bool = False) -> TuningResult:
    server = SimulatedServer(lambda c: 100.0 * c.workers * (2 if c.variant == "int8" else 1), limit)
    outcome = TuningSearch(SPACE, Candidate(), server.run_trial, SearchBudget()).run()
    figures = {
        "ttft_p50": 0.01,
        "ttft_p99": 0.02,
        "itl_p50": 0.001,
        "itl_p99": 0.002,
        "tokens_per_second": 500.0,
    }
    steps = tuple(
        LoadStep(
            None, n, 1.0, 9, 9, 9, 0, 0.01, 0.01 * n, 0.01, generation=figures if is_generation else None
        )
        for n in (1, 4)
    )
    loops = [Trial(c, CONCURRENCY, 0, steps, limit) for c in (outcome.baseline, outcome.chosen)]
    outcome = replace(outcome, trials=[*outcome.trials, *loops])
    return TuningResult(HOSTILE, limit, outcome, {"model": HOSTILE}, VARIANTS, is_generation)


def test_the_report_has_plots_tables_and_the_chosen_point(tmp_path: Path) -> None:
    write_output(result(), tmp_path)
    page = ReportPage(tmp_path / "report.html")
    assert f"Tuning of {HOSTILE}" in page.text
    assert "int8, 2 × default threads, batch " in page.text and "times the" in page.text
    assert set(page.plots) == {
        "Throughput against latency", "Throughput by concurrency", "Latency by concurrency",
        "Memory", "Accuracy",
    }  # fmt: skip
    assert set(page.plots) < set(page.tables)
    assert "the current configuration had 9" in page.text
    lines = {line["name"]: line for line in page.plots["Throughput against latency"]["series"]}
    assert lines["limit"]["markLine"]["data"][0]["yAxis"] == 20
    [[throughput, p99]] = lines["chosen"]["data"]
    assert 300 < throughput < 400 and p99 <= 20
    assert ["bfloat16", "not finite", "0", "2", "3 / 9.9", "no: <i>"] in page.tables["Accuracy"]
    assert ["onnx", "–", "–", "–", "–", "not made: no <onnx>"] in page.tables["Accuracy"]


def test_the_files_of_values_have_each_trial_and_load(tmp_path: Path) -> None:
    made = result()
    write_output(made, tmp_path)
    with (tmp_path / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len([t for t in made.outcome.trials if t.phase != CONCURRENCY])
    assert {row[""] for row in rows} == {"", "current", "chosen"}
    assert float(rows[0]["goodput/s"]) > 0 and rows[0]["memory MiB"] == "256"
    with (tmp_path / "steps.csv").open() as file:
        assert len(list(csv.DictReader(file))) == sum(len(t.steps) for t in made.outcome.trials)


def test_without_a_configuration_within_the_limit_the_report_has_the_best(tmp_path: Path) -> None:
    made = result(limit=0.0005)
    assert made.summary.startswith("No configuration meets a p99 of 0.5 ms. The lowest p99 was ")
    write_output(made, tmp_path)
    page = ReportPage(tmp_path / "report.html")
    assert "chosen" not in [line["name"] for line in page.plots["Throughput against latency"]["series"]]


@pytest.mark.slow
def test_text_generation_has_tokens_and_their_times(tmp_path: Path) -> None:
    write_output(result(is_generation=True), tmp_path)
    page = ReportPage(tmp_path / "report.html")
    for heading, value in (
        ("Tokens per second by concurrency", "500"),
        ("Time to first token by concurrency", "10"),
        ("Inter-token latency by concurrency", "2"),
    ):
        assert page.tables[heading][1][1:] == ["1", value]
        assert page.plots[heading]["series"][0]["data"] == [[1, float(value)], [4, float(value)]]
