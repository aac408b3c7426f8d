"""The comparison's report: medians of rounds, the targets they are held against, and both as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from serve_app.load_test.profile import LoadResult
from tests.benchmarks.cpu_time import PARTS, Parts

FASTAPI, BARE_PARSER = "FastAPI", "bare-parser"
SERVE1, SERVE2 = "TorchServe, 1 worker", "TorchServe, 2 workers"
SERVE_BATCHED = "TorchServe, 1 worker, batches of 16"
RELAY1, RELAY2 = "Torchrelay, 1 replica", "Torchrelay, 2 replicas"
RELAY_BATCHED = "Torchrelay, 1 replica, batches of 16"
GATEWAY = "Torchrelay, by the gateway"
GRPC, GRPC_BATCHED = "Torchrelay, gRPC", "Torchrelay, gRPC, batches of 16"
SERVE_GRPC, SERVE_GRPC_BATCHED = "TorchServe, gRPC", "TorchServe, gRPC, batches of 16"
PLAIN = "Torchrelay, no middleware"
LOOP = "Bare loop of full batches"
OIP, OIP_GATEWAY = "Open Inference Protocol, at the replica", "Open Inference Protocol, by the gateway"
RAW, AS_JSON = "raw", "JSON"  # ways in which a tensor travels
WHOLE = "Torchrelay, a policy of 100 %"
SPLIT = "Torchrelay, split 90/10"
STICKY = "Torchrelay, sticky 90/10"
MEASURED = "Torchrelay, experiment 50/50"
ALONE = "Torchrelay, no shadow"
SHADOWED = "Torchrelay, 10 % shadowed"
UNSORTED = "Torchrelay, batches as rows came"
BUCKETED = "Torchrelay, batches by length"
BARE = "Torchrelay, without keys, metrics and access log"
KEYLESS = "Torchrelay, without keys"
FULL = "Torchrelay, with keys, metrics and access log"
CUSTOM = "Torchrelay, with keys, metrics, access log and two metrics of the handler"
SERVED, LOOPED = "Torchrelay, {}", "Bare loop, {}"  # a runtime
SENTENCES, PARAGRAPHS = "runtimes", "runtimes, 64 tokens"  # groups: texts of 16 tokens, and longer ones
PLAIN_MODEL, ONNX, INT8 = "plain", "onnx", "onnx-int8"  # variants, as `torchrelay optimize` calls them
UNCACHED_PREFIX, CACHED_PREFIX = "without prefix caching", "with prefix caching"
ALONE_EACH, TOGETHER, CONTINUOUS = "one after another", "one batch, padded", "continuous batching"


@dataclass(frozen=True, order=True)
class Case:
    """What is measured: a model under so many connections, or under none. ``group`` names its table: a group
    of the comparison, and after a comma what of it.
    """

    group: str
    connections: int = 0


Figures = Mapping[Case, Mapping[str, Sequence[LoadResult]]]  # case -> contender -> one Result a round
CpuTimes = Mapping[Case, Mapping[str, Sequence[Parts]]]  # the same, in seconds for each request


@dataclass(frozen=True)
class Footprint:
    """What a server costs before anybody asks it anything."""

    contender: str
    ready: float = math.nan  # seconds from the command to the first healthy ping
    first_answer: float = (
        math.nan
    )  # seconds from the command to the first prediction, a registration included
    idle: float = math.nan  # bytes of the whole tree without a model
    with_model: float = math.nan  # bytes with the mlp on one worker
    per_worker: float = math.nan  # bytes of each further worker
    counted: str = ""  # PSS or RSS
    idle_cpu: float = math.nan  # cores
    processes: int = 0


@dataclass(frozen=True)
class Target:
    """A ratio that is to be reached: ours over theirs, of one measure in one case.

    Without ``needed`` the report has the ratio alone.
    """

    case: Case
    ours: str
    theirs: str
    measure: Literal["throughput", "p50", "p99", "mean"]
    needed: float | None = None

    @property
    def text(self) -> str:
        sign = "≥" if self.measure == "throughput" else "≤"
        count = self.case.connections
        where = f"{self.case.group}, {count} connection{'s' * (count != 1)}" if count else self.case.group
        if self.needed is None:
            return f"{where}: {self.measure} of *{self.ours}* relative to *{self.theirs}*"
        return f"{where}: {self.measure} of *{self.ours}* {sign} {self.needed:g} × *{self.theirs}*"

    def ratio(self, figures: Figures) -> float:
        """Return the median of the rounds' own ratios, which a machine that slows down between rounds does
        not move.

        Return the ratio of the medians where one side missed a round, NaN where one was not measured.
        """
        ours, theirs = self._sides(figures)
        if len(ours) != len(theirs):
            return self.of_medians(figures)
        return _median(
            [_over(getattr(a, self.measure), getattr(b, self.measure)) for a, b in zip(ours, theirs)]
        )

    def of_medians(self, figures: Figures) -> float:
        """Return the ratio of the medians over all rounds; NaN where either side was not measured."""
        return _over(*(median(results, self.measure) for results in self._sides(figures)))

    def _sides(self, figures: Figures) -> tuple[Sequence[LoadResult], Sequence[LoadResult]]:
        contenders = figures.get(self.case, {})
        return contenders.get(self.ours, ()), contenders.get(self.theirs, ())

    def verdict(self, figures: Figures) -> str:
        ratio = self.ratio(figures)
        if math.isnan(ratio):
            return "not measured"
        if self.needed is None:
            return "-"
        is_reached = ratio >= self.needed if self.measure == "throughput" else ratio <= self.needed
        return "reached" if is_reached else "**not reached**"


TARGETS = (
    *(
        target
        for ours in (RELAY1, RELAY_BATCHED)
        for target in (
            Target(Case("echo", 32), ours, SERVE1, "throughput", 15.0),
            Target(Case("echo", 32), ours, FASTAPI, "throughput", 2.5),
            Target(Case("echo", 32), ours, SERVE1, "p99", 0.6),
            Target(Case("echo", 1), ours, FASTAPI, "p50", 1.2),
        )
    ),
    *(
        target
        for connections in (32, 64)
        for ours, theirs, needed in ((RELAY1, SERVE1, 2.8), (RELAY1, SERVE2, 2.0), (RELAY2, SERVE2, 2.0))
        for target in (
            Target(Case("mlp", connections), ours, theirs, "throughput", needed),
            Target(Case("mlp", connections), ours, theirs, "p99", 0.6),
        )
    ),
    Target(Case("bare-parser, echo", 1), RELAY_BATCHED, BARE_PARSER, "p50"),
    Target(Case("bare-parser, echo", 32), RELAY_BATCHED, BARE_PARSER, "throughput", 0.5),
    Target(Case("bare-parser, mlp", 32), RELAY_BATCHED, BARE_PARSER, "throughput"),
    Target(Case("bare-parser, mlp", 64), RELAY_BATCHED, BARE_PARSER, "throughput"),
    Target(Case("encoder", 32), RELAY1, LOOP, "throughput", 0.95),
    Target(Case("images", 32), RELAY1, LOOP, "throughput", 0.9),
    Target(Case("images", 32), RELAY1, SERVE1, "throughput", 1.0),
    Target(Case("gateway", 32), GATEWAY, RELAY1, "throughput", 0.7),
    Target(Case("gateway", 64), GATEWAY, RELAY1, "throughput", 0.7),
    Target(Case("oip", 32), OIP, RELAY_BATCHED, "throughput", 0.9),
    Target(Case("oip", 32), OIP_GATEWAY, RELAY_BATCHED, "throughput", 0.6),
    Target(Case("oip, 1 MiB", 1), RAW, AS_JSON, "throughput", 10.0),
    Target(Case("grpc", 32), GRPC_BATCHED, RELAY_BATCHED, "throughput", 0.6),
    Target(Case("grpc", 32), GRPC, SERVE_GRPC, "throughput", 1.0),
    Target(Case("grpc", 32), GRPC_BATCHED, SERVE_GRPC_BATCHED, "throughput", 1.0),
    Target(Case("traffic", 32), WHOLE, RELAY_BATCHED, "throughput", 0.97),
    *(
        Target(Case("traffic", connections), ours, RELAY_BATCHED, "throughput", 0.6)
        for connections in (32, 64)
        for ours in (SPLIT, STICKY, MEASURED)
    ),
    Target(Case("traffic", 32), SPLIT, SERVE1, "throughput", 2.0),
    Target(Case("traffic", 64), SPLIT, SERVE1, "throughput", 2.0),
    Target(Case("shadow", 64), SHADOWED, ALONE, "p99", 1.1),
    Target(Case("lengths", 32), BUCKETED, UNSORTED, "throughput", 1.3),
    Target(Case("lengths", 64), BUCKETED, UNSORTED, "throughput", 1.3),
    *(
        Target(Case(group, 32), SERVED.format(runtime), LOOPED.format(runtime), "throughput", 0.95)
        for group in (SENTENCES, PARAGRAPHS)
        for runtime in ("eager", "ONNX", "ONNX int8")
    ),
    Target(Case("variants, MiniLM, batches of 1"), ONNX, PLAIN_MODEL, "throughput", 1.15),
    Target(Case("variants, MiniLM, batches of 1"), INT8, PLAIN_MODEL, "throughput", 2.5),
    Target(Case("generation"), CONTINUOUS, ALONE_EACH, "throughput", 1.8),
    Target(Case("generation"), CONTINUOUS, TOGETHER, "mean", 0.5),
    Target(Case("prefix"), CACHED_PREFIX, UNCACHED_PREFIX, "p50", 0.5),
    Target(Case("middleware", 32), RELAY1, PLAIN, "throughput", 0.92),
    Target(Case("costs", 32), FULL, KEYLESS, "throughput", 0.95),
    Target(Case("costs", 32), CUSTOM, BARE, "throughput", 0.9),
)

# What a table counts, by how its group begins.
_UNITS = {
    "variants": "rows/s",
    "generation": "tokens/s",
    "sharding, tokens": "tokens/s",
    "sharding": "rows/s",
}


@dataclass(frozen=True)
class Report:
    """A whole comparison."""

    machine: Mapping[str, str]
    command: str
    figures: Figures
    footprints: Sequence[Footprint] = ()
    notes: Sequence[str] = ()
    cpu: CpuTimes = field(default_factory=dict)
    targets: Sequence[Target] = field(default=TARGETS)
    sections: Mapping[str, str] = field(default_factory=dict)  # tables of groups with figures of their own

    def markdown(self) -> str:
        """All of it, ready to be pasted into a page."""
        parts = [f"`{self.command}`", _list(f"{key}: {value}" for key, value in self.machine.items())]
        for group in dict.fromkeys(case.group for case in self.figures):
            parts += [f"### {group}", self._figures(group)]
            if any(case.group == group for case in self.cpu):
                parts += ["CPU time of the server's processes, µs for each request:", self._cpu(group)]
        for group, table in self.sections.items():
            parts += [f"### {group}", table]
        if self.footprints:
            parts += ["### Memory and start", self._footprints()]
        parts += ["### Targets", self._targets()]
        if self.notes:
            parts += ["### Notes", _list(self.notes)]
        return "\n\n".join(parts) + "\n"

    def _figures(self, group: str) -> str:
        rows = []
        means = any(not math.isnan(r.mean) for r in self._results(group))
        for case, contenders in self.figures.items():
            if case.group != group:
                continue
            for name, results in contenders.items():
                rate = [r.throughput for r in results]
                errors = sum(r.failed for r in results)
                rows.append(
                    (
                        str(case.connections or "-"),
                        name,
                        _count(_median(rate)),
                        f"{_count(min(rate))} to {_count(max(rate))}" if len(rate) > 1 else "-",
                        *((_milliseconds(median(results, "mean")),) if means else ()),
                        *(_milliseconds(median(results, m)) for m in ("p50", "p90", "p99")),
                        _milliseconds(max((r.max for r in results), default=math.nan)),
                        str(errors),
                    )
                )
        unit = next((unit for start, unit in _UNITS.items() if group.startswith(start)), "requests/s")
        head = ("connections", "", unit, "of the rounds", *(("mean ms",) if means else ()))
        return _table((*head, "p50 ms", "p90 ms", "p99 ms", "max ms", "errors"), rows, left={1})

    def _cpu(self, group: str) -> str:
        rows = []
        for case, contenders in self.cpu.items():
            for name, rounds in contenders.items() if case.group == group else ():
                sums = [sum(parts.values()) for parts in rounds]
                each = [_median([parts.get(part, math.nan) for parts in rounds]) for part in PARTS]
                cells = [_number(seconds * 1e6, "{:,.0f}") for seconds in (_median(sums), *each)]
                rows.append((str(case.connections or "-"), name, *cells))
        return _table(("connections", "", "all", *PARTS), rows, left={1})

    def _results(self, group: str) -> list[LoadResult]:
        ours = (contenders for case, contenders in self.figures.items() if case.group == group)
        return [result for contenders in ours for results in contenders.values() for result in results]

    def _footprints(self) -> str:
        rows = [
            (
                f.contender,
                _number(f.ready, "{:.1f}"),
                _number(f.first_answer, "{:.1f}"),
                *(_number(b / 2**20, "{:,.0f}") for b in (f.idle, f.with_model, f.per_worker)),
                f.counted or "-",
                str(f.processes or "-"),
                _number(f.idle_cpu, "{:.2f}"),
            )
            for f in self.footprints
        ]
        head = ("", "ready s", "first answer s", "idle MiB", "with the mlp MiB", "per further worker MiB")
        return _table((*head, "counted as", "processes", "idle cores"), rows, left={0, 6})

    def _targets(self) -> str:
        rows = [
            (
                target.text,
                _number(target.ratio(self.figures), "{:.2f}"),
                _number(target.of_medians(self.figures), "{:.2f}"),
                target.verdict(self.figures),
            )
            for target in self.targets
        ]
        return _table(("target", "measured", "of the medians", ""), rows, left={0, 3})


def median(results: Sequence[LoadResult], measure: str) -> float:
    """Return the median over rounds of one number of a result; NaN without rounds."""
    return _median([getattr(result, measure) for result in results])


def _median(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else math.nan


def _over(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else math.nan


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)


def _count(value: float) -> str:
    return _number(value, "{:,.0f}")


def _milliseconds(seconds: float) -> str:
    return _number(seconds * 1000, "{:.2f}")


def _list(items) -> str:
    return "\n".join(f"- {item}" for item in items)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: set[int]) -> str:
    rules = [":--" if column in left else "--:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rules, *rows))
