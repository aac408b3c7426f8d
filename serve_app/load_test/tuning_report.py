"""The output of a tuning run: an HTML report, CSV files, and the configuration to use."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.load_test.candidate import Candidate
from serve_app.load_test.html_report import Cell, Report, ReportSection, ReportTable, write_report
from serve_app.load_test.plots import PlotSeries, bar_plot, line_plot
from serve_app.load_test.rate_search import LoadStep
from serve_app.load_test.trials import Trial
from serve_app.load_test.tuner import CONCURRENCY
from serve_app.load_test.tuning_search import MIN_GAIN, SearchOutcome

_FAINT_SERIES = 12  # other candidates in the plot of latencies, the best first
_MIB = 2**20
_LEAST_DIFFERENCE = 1e-8  # in the plot of the accuracy: float32 has no smaller one


@dataclass(frozen=True)
class TuningResult:
    """The outcome of a run with its conditions; ``variants`` is the result of the search for variants."""

    model: str
    limit: float
    outcome: SearchOutcome
    facts: Mapping[str, str]
    variants: Mapping[str, Any] | None = None
    is_generation: bool = False

    @property
    def latency(self) -> str:
        return "time to first token" if self.is_generation else "latency"

    @property
    def summary(self) -> str:
        """Return the result in two sentences."""
        outcome, limit = self.outcome, f"{self.limit * 1000:g} ms"
        if not outcome.meets_limit:
            best = min(outcome.trials, key=lambda trial: trial.lowest_p99)
            return (
                f"No configuration meets a p99 of {limit}. The lowest p99 was "
                f"{best.lowest_p99 * 1000:.1f} ms, of {best.candidate.label}."
            )
        goodput = outcome.goodput(outcome.chosen)
        if outcome.chosen == outcome.baseline:
            return (
                f"The current configuration is the best that was found: {goodput:,.1f} requests/s within "
                f"{limit}. No other is faster by {MIN_GAIN - 1:.0%}."
            )
        before = outcome.goodput(outcome.baseline)
        if not before:
            return (
                f"{outcome.chosen.label}: {goodput:,.1f} requests/s within {limit}. The current "
                "configuration does not meet the limit."
            )
        ratio = statistics.median(outcome.ratios) if outcome.ratios else goodput / before
        basis = f"the median of {len(outcome.ratios)} rounds" if outcome.ratios else "of one measurement each"
        return (
            f"{outcome.chosen.label}: {goodput:,.1f} requests/s within {limit}, {ratio:.2f} times the "
            f"{before:,.1f} of the current configuration ({basis})."
        )


def write_output(result: TuningResult, folder: Path) -> None:
    """Write report.html, trials.csv and steps.csv. Raises OSError."""
    measured = [trial for trial in result.outcome.trials if trial.phase != CONCURRENCY]
    _write_csv(folder / "trials.csv", _trial_table(measured, result.outcome))
    _write_csv(folder / "steps.csv", _step_table(result.outcome.trials))
    chosen = result.outcome.chosen
    facts = {**result.facts, "current configuration": result.outcome.baseline.label, "chosen": chosen.label}
    facts["noise"] = _noise(result.outcome)
    sections = [_latency_section(result), *_concurrency_sections(result), _memory_section(result)]
    sections += _accuracy_sections(result)
    text = "A goodput is the highest of the loads whose p99 meets the limit. Halving has longer loads."
    sections.append(ReportSection("Trials", text, _trial_table(measured, result.outcome)))
    write_report(Report(f"Tuning of {result.model}", result.summary, facts, sections), folder / "report.html")


def _noise(outcome: SearchOutcome) -> str:
    """Return how much the goodput of the current configuration varied over the run."""
    own = [t.goodput for t in outcome.trials if t.candidate == outcome.baseline and t.phase != CONCURRENCY]
    return (
        f"the current configuration had {min(own):,.1f} to {max(own):,.1f} requests/s in {len(own)} trials; "
        "a wide range shows that other work used the machine"
    )


def _names(result: TuningResult) -> dict[Candidate, str]:
    """Return the name of each candidate in plots."""
    outcome = result.outcome
    names = {trial.candidate: trial.candidate.label for trial in outcome.trials}
    names[outcome.baseline] = f"current: {outcome.baseline.label}"
    if outcome.chosen != outcome.baseline:
        names[outcome.chosen] = f"chosen: {outcome.chosen.label}"
    return names


def _ranked(outcome: SearchOutcome) -> list[Candidate]:
    """Return the candidates with measurements: the chosen one, the baseline, then by goodput."""
    measured = {trial.candidate for trial in outcome.trials if trial.steps}
    others = measured - {outcome.chosen, outcome.baseline}
    first = [c for c in dict.fromkeys([outcome.chosen, outcome.baseline]) if c in measured]
    return [*first, *sorted(others, key=lambda c: (-outcome.goodput(c), c.label))]


def _latency_section(result: TuningResult) -> ReportSection:
    outcome, names = result.outcome, _names(result)
    series: list[PlotSeries] = []
    rows: list[list[Cell]] = []
    for candidate in _ranked(outcome):
        steps = _undisturbed([s for t in outcome.of(candidate) for s in t.steps if s.rate is not None])
        is_faint = candidate not in (outcome.chosen, outcome.baseline)
        if len(series) < _FAINT_SERIES:
            series.append(PlotSeries(names[candidate], [(s.throughput, _ms(s.p99)) for s in steps], is_faint))
        rows += [[names[candidate], s.rate, s.throughput, s.goodput, _ms(s.p50), _ms(s.p99)] for s in steps]
    columns = ["candidate", "arrivals/s", "responses/s", "goodput/s", "p50 ms", "p99 ms"]
    limit = result.limit * 1000
    plot = line_plot(
        series, "responses/s", f"p99 of the {result.latency}, ms",
        limit=limit, chosen=_chosen_point(outcome), is_logarithmic=True,
    )  # fmt: skip
    text = "Poisson arrivals; each point is a load of one rate. The dashed line is the limit."
    return ReportSection("Throughput against latency", text, ReportTable(columns, rows), plot)


def _undisturbed(steps: Sequence[LoadStep]) -> list[LoadStep]:
    """Return the step with the lowest p99 of each rate, by rate: a repeated load was disturbed before."""
    best: dict[float | None, LoadStep] = {}
    for step in steps:
        if step.rate not in best or step.p99 < best[step.rate].p99 or math.isnan(best[step.rate].p99):
            best[step.rate] = step
    return sorted(best.values(), key=lambda step: step.rate or 0.0)


def _chosen_point(outcome: SearchOutcome) -> tuple[float, float] | None:
    best = [trial.best for trial in outcome.of(outcome.chosen) if trial.best is not None]
    if not best:
        return None
    middle = sorted(best, key=lambda step: step.goodput)[(len(best) - 1) // 2]
    return middle.throughput, _ms(middle.p99) or 0.0


def _concurrency_sections(result: TuningResult) -> list[ReportSection]:
    names = _names(result)
    trials = [t for t in result.outcome.trials if t.phase == CONCURRENCY and t.steps]
    trials.sort(key=lambda trial: trial.candidate != result.outcome.chosen)  # colours as in the first plot
    if not trials:
        return []
    text = "A closed loop: each client sends its next request after its response."
    sections = [
        _by_concurrency(
            "Throughput by concurrency", text, "responses/s", trials, names, lambda s: s.throughput
        )
    ]
    latency = f"p99 of the {result.latency}, ms"
    sections.append(
        _by_concurrency(
            "Latency by concurrency", text, latency, trials, names, lambda s: _ms(s.p99), result.limit
        )
    )
    if result.is_generation:
        figures = (
            ("Tokens per second by concurrency", "tokens/s", lambda g: g["tokens_per_second"]),
            ("Time to first token by concurrency", "median, ms", lambda g: _ms(g["ttft_p50"])),
            ("Inter-token latency by concurrency", "p99, ms", lambda g: _ms(g["itl_p99"])),
        )
        sections += [
            _by_concurrency(heading, text, y, trials, names, lambda s, f=figure: f(s.generation))
            for heading, y, figure in figures
        ]
    return sections


def _by_concurrency(
    heading: str,
    text: str,
    y: str,
    trials: Sequence[Trial],
    names: Mapping[Candidate, str],
    figure: Any,
    limit: float | None = None,
) -> ReportSection:
    series = [PlotSeries(names[t.candidate], [(s.connections, figure(s)) for s in t.steps]) for t in trials]
    rows: list[list[Cell]] = [
        [names[t.candidate], step.connections, figure(step)] for t in trials for step in t.steps
    ]
    plot = line_plot(series, "clients", y, limit=None if limit is None else limit * 1000)
    return ReportSection(heading, text, ReportTable(["candidate", "clients", y], rows), plot)


def _memory_section(result: TuningResult) -> ReportSection:
    names = _names(result)
    rows: list[list[Cell]] = []
    for candidate in _ranked(result.outcome):
        found = [t.memory for t in result.outcome.of(candidate) if t.memory]
        if found:
            rows.append([names[candidate], round(max(found) / _MIB)])
    plot = bar_plot([str(row[0]) for row in rows], {"MiB": [float(row[1] or 0) for row in rows]}, "MiB")
    text = "The resident memory of all workers after the loads; memory that workers share counts in each."
    return ReportSection("Memory", text, ReportTable(["candidate", "MiB"], rows), plot if rows else None)


def _accuracy_sections(result: TuningResult) -> list[ReportSection]:
    if result.variants is None:
        return []
    rows: list[list[Cell]] = []
    variants = result.variants["variants"]
    for variant in variants:
        difference = "not finite" if variant["largest"] is None else variant["largest"]
        state = f"no: {variant['outside']}" if variant["outside"] else "yes"
        times = " / ".join(f"{ms:.3g}" for ms in variant["ms"].values())
        rows.append([variant["name"], difference, variant["cosine"], variant["mib"], times, state])
    rows += [
        [name, None, None, None, None, f"not made: {why}"] for name, why in result.variants["failed"].items()
    ]
    sizes = " / ".join(variants[0]["ms"]) if variants else ""
    columns = ["variant", "largest difference", "lowest cosine", "weights, MiB"]
    columns += [f"model, ms at batch {sizes}", "within the tolerance"]
    others = variants[1:]
    plot = None
    if others:
        bars = {
            "largest difference": [_drawn_difference(variant["largest"]) for variant in others],
            "1 − lowest cosine": [_drawn_difference(1 - variant["cosine"]) for variant in others],
        }
        plot = bar_plot(
            [v["name"] for v in others],
            bars,
            "difference from plain (1e-8 or less is drawn at 1e-8)",
            is_logarithmic=True,
        )
    text = (
        "Outputs for the samples, compared with the plain model's. Variants outside of the tolerance, and "
        "those whose model is slower at every batch size, are not tried on the server."
    )
    return [ReportSection("Accuracy", text, ReportTable(columns, rows), plot)]


def _drawn_difference(value: float | None) -> float | None:
    return None if value is None else max(value, _LEAST_DIFFERENCE)


def _trial_table(trials: Sequence[Trial], outcome: SearchOutcome) -> ReportTable:
    columns = [
        "trial", "phase", "round", "variant", "workers", "threads", "batch", "delay ms", "goodput/s",
        "p50 ms", "p99 ms", "in flight", "memory MiB", "loads", "seconds", "",
    ]  # fmt: skip
    rows: list[list[Cell]] = []
    marked = set()
    for number, trial in enumerate(trials, 1):
        c, best = trial.candidate, trial.best
        if c == outcome.chosen:
            marked.add(number - 1)
        role = "current" if c == outcome.baseline else "chosen" if c == outcome.chosen else ""
        figures: list[Cell] = [
            0.0,
            None,
            None if math.isinf(trial.lowest_p99) else _ms(trial.lowest_p99),
            None,
        ]
        if best is not None:
            figures = [best.goodput, _ms(best.p50), _ms(best.p99), _finite(best.in_flight)]
        memory = round(trial.memory / _MIB) if trial.memory else None
        threads = str(c.threads or "default")
        rows.append(
            [number, trial.phase, trial.round, c.variant, c.workers, threads, c.batch_size, c.max_batch_delay,
             *figures, memory, len(trial.steps), trial.seconds, trial.error or role]
        )  # fmt: skip
    return ReportTable(columns, rows, frozenset(marked))


def _step_table(trials: Sequence[Trial]) -> ReportTable:
    columns = [
        "trial", "phase", "candidate", "arrivals/s", "clients", "seconds", "requests", "failed",
        "responses/s", "goodput/s", "p50 ms", "p99 ms", "generator late p99 ms",
        "ttft p50 ms", "ttft p99 ms", "itl p50 ms", "itl p99 ms", "tokens/s",
    ]  # fmt: skip
    rows = []
    for number, trial in enumerate(trials, 1):
        rows += [[number, trial.phase, trial.candidate.label, *_step_cells(step)] for step in trial.steps]
    return ReportTable(columns, rows)


def _step_cells(step: LoadStep) -> list[Cell]:
    clients = step.connections if step.rate is None else None
    cells: list[Cell] = [step.rate, clients, step.seconds, step.requests, step.failed, step.throughput]
    cells += [step.goodput, _ms(step.p50), _ms(step.p99), _ms(step.lag)]
    times = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
    if step.generation is None:
        return [*cells, *[None] * 5]
    return [*cells, *(_ms(step.generation[key]) for key in times), step.generation["tokens_per_second"]]


def _write_csv(file: Path, table: ReportTable) -> None:
    with file.open("w", newline="", encoding="utf-8") as output:
        writer = csv.writer(output)
        writer.writerow(table.columns)
        writer.writerows([round(v, 6) if isinstance(v, float) else v for v in row] for row in table.rows)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds * 1000, 3)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
