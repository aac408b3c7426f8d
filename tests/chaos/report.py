"""The table of a run, as Markdown and JSON; of several applications of a fault, the worst figures."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from tests.chaos.run import Result

_HEAD = (
    "fault",
    "runs",
    "unavailable s",
    "failed requests",
    "recovery s",
    "changes acknowledged / lost",
    "experiment answered / counted",
    "verdict",
)


def describe_machine() -> str:
    """Return the machine in one line."""
    memory = psutil.virtual_memory().total / (1 << 30)
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def markdown(results: Sequence[Result], skipped: dict[str, str], orphans: dict[str, list[str]]) -> str:
    """Return the table of all faults, with what was skipped and what was left behind."""
    lines = [f"| {' | '.join(_HEAD)} |", "|" + "---|" * len(_HEAD)]
    for fault in dict.fromkeys(result.fault for result in results):
        lines.append(_row([result for result in results if result.fault == fault]))
    lines += [f"| {fault} | 0 | | | | | | skipped: {reason} |" for fault, reason in skipped.items()]
    left = "; ".join(f"{setup}: {', '.join(names)}" for setup, names in orphans.items() if names)
    lines += ["", f"Processes after the stop of each server: {left or 'none'}."]
    problems = [f"* {result.fault}: {problem}" for result in results for problem in result.problems]
    return "\n".join([*lines, *([""] if problems else []), *problems, ""])


def _row(runs: Sequence[Result]) -> str:
    failed: Counter[str] = Counter()
    for run in runs:
        failed.update(run.failed)
    total = sum(run.requests for run in runs)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(failed.items()))
    cells = (
        runs[0].fault,
        str(len(runs)),
        f"{max(run.unavailable for run in runs):.2f}",
        f"{sum(failed.values())} of {total}" + (f" ({kinds})" if kinds else ""),
        f"{max(run.recovery for run in runs):.1f}"
        + (" (restart)" if any(run.restarts for run in runs) else ""),
        f"{sum(run.acknowledged for run in runs)} / {sum(len(run.lost) for run in runs)}",
        f"{sum(run.answered for run in runs)} / {sum(run.counted for run in runs)}",
        "passed" if all(run.passed for run in runs) else "**failed**",
    )
    return f"| {' | '.join(cells)} |"


def write(
    folder: Path, results: Sequence[Result], skipped: dict[str, str], orphans: dict[str, list[str]]
) -> None:
    """Write ``chaos.md`` and ``chaos.json``, the latter with the outcomes of every second."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    (folder / "chaos.md").write_text(f"Machine: {machine}\n\n{markdown(results, skipped, orphans)}")
    document = {
        "machine": machine,
        "results": [{**asdict(result), "passed": result.passed} for result in results],
        "skipped": skipped,
        "orphans": orphans,
    }
    (folder / "chaos.json").write_text(json.dumps(document, indent=1))
