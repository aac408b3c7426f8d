"""Coverage-guided fuzzing of every parser: ``python -m tests.fuzz``.

Each target runs in a process of its own under atheris (libFuzzer) until it has had ``--runs`` inputs, or for
``--seconds``. The inputs that reach new code are kept in the corpus, an input that fails is kept under
``--findings``, and both are replayed by the tests.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fuzz.corpus import CORPUS, read_corpus, write_corpus
from tests.fuzz.targets import TARGETS

_STATUS = re.compile(r"#(\d+)\s+\S+.*?cov: (\d+)")
_MAX_CORPUS = 300  # inputs of one target, the smallest first


@dataclass(frozen=True)
class Result:
    """The run of one target; ``finding`` is the last lines of its output where it failed."""

    name: str
    inputs: int
    coverage: int  # edges
    seconds: float
    corpus: int  # inputs kept
    finding: str = ""


def fuzz(name: str, runs: int, seconds: float, findings: Path, keep: bool) -> Result:
    """Run one target in a process of its own; with ``keep`` the inputs that reached new code are stored."""
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        for i, data in enumerate([*TARGETS[name].seeds, *read_corpus(name)]):
            (corpus / f"{i:04d}").write_bytes(data)
        findings.mkdir(parents=True, exist_ok=True)
        options = [f"-runs={runs}", f"-max_total_time={seconds:.0f}", str(corpus)]
        output = _run_worker(name, folder, findings, options)
        counts = [(int(count), int(edges)) for count, edges in _STATUS.findall(output.stdout)]
        inputs, coverage = max((c for c, _ in counts), default=0), max((e for _, e in counts), default=0)
        finding = "" if output.returncode == 0 else "\n".join(output.stdout.splitlines()[-40:])
        kept = len(read_corpus(name))
        if keep:  # libFuzzer stores each input that reaches a new edge
            kept = write_corpus(name, [file.read_bytes() for file in corpus.iterdir()], _MAX_CORPUS)
    return Result(name, inputs, coverage, time.monotonic() - started_at, kept, finding)


def _run_worker(
    name: str, folder: str, findings: Path, options: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    # The worker limits the computing time of an input; a parser that does not end is stopped here.
    limits = [f"-max_len={TARGETS[name].max_length}", "-timeout=300", "-rss_limit_mb=2048"]
    if tokens := ["".join(f"\\x{byte:02x}" for byte in token) for token in TARGETS[name].dictionary]:
        dictionary = Path(folder, "dictionary")
        dictionary.write_text("".join(f'"{token}"\n' for token in tokens))
        limits.append(f"-dict={dictionary}")
    command = [sys.executable, "-m", "tests.fuzz.worker", name, str(findings), *limits, *options]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def main() -> int:
    """Fuzz the selected targets and print a table of inputs, coverage and findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs of each target")
    parser.add_argument("--seconds", type=float, default=600, help="limit of each target; 0: none")
    parser.add_argument("--jobs", type=int, default=1, help="targets at once")
    parser.add_argument(
        "--findings", type=Path, default=Path("fuzz-findings"), help="folder of failed inputs"
    )
    parser.add_argument("--keep", action="store_true", help=f"store the new inputs in {CORPUS.name}/")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    console = Console()
    table = Table("target", "inputs", "edges", "seconds", "corpus", "finding", title="Fuzzed parsers")
    failed = False
    with ThreadPoolExecutor(options.jobs) as pool:
        names = options.targets or list(TARGETS)
        for result in pool.map(
            lambda name: fuzz(name, options.runs, options.seconds, options.findings, options.keep), names
        ):
            console.print(f"{result.name}: {result.inputs:,} inputs in {result.seconds:.0f} s")
            counts = (f"{result.inputs:,}", str(result.coverage), f"{result.seconds:.0f}", str(result.corpus))
            table.add_row(result.name, *counts, "[red]yes" if result.finding else "none")
            if result.finding:
                failed = True
                print(result.finding)
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
