"""The order and the timeouts of a comparison."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from serve_app.load_test import LoadProfile, LoadResult
from tests.benchmarks import report, suite
from tests.benchmarks.comparison import Comparison
from tests.benchmarks.report import Case
from tests.benchmarks.servers import Peer, PeerFailed
from tests.benchmarks.targets import Contender, bare_loop


@pytest.fixture
def comparison(tmp_path):
    return Comparison(tmp_path, 2, 0.1, Progress(console=Console(quiet=True)))


def contender(name: str, seen: list[tuple[str, int]]) -> Contender:
    def measure(load: LoadProfile) -> LoadResult:
        seen.append((name, load.connections))
        return LoadResult("asyncio", load.connections, 1.0, 10, 10, 0.1, 0.1, 0.1, 0.1)

    return Contender(name, measure)


@pytest.mark.slow
def test_rounds_are_interleaved(comparison):
    seen: list[tuple[str, int]] = []
    comparison.interleave("echo", [contender("a", seen), contender("b", seen)], (1, 32))
    assert seen == [("a", 1), ("b", 1), ("a", 1), ("b", 1), ("a", 32), ("b", 32), ("a", 32), ("b", 32)]
    assert {case: {n: len(r) for n, r in of.items()} for case, of in comparison.figures.items()} == {
        Case("echo", 1): {"a": 2, "b": 2},
        Case("echo", 32): {"a": 2, "b": 2},
    }


@pytest.mark.nightly
def test_a_contender_that_fails_costs_only_its_own_rows(comparison):
    def broken(load: LoadProfile) -> LoadResult:
        raise PeerFailed("b is gone")

    comparison.interleave("echo", [contender("a", []), Contender("b", broken)], (1,))
    assert list(comparison.figures[Case("echo", 1)]) == ["a"]
    assert comparison.notes == ["b is gone", "b is gone"]


@pytest.mark.nightly
def test_nothing_to_measure_is_no_table(comparison):
    comparison.interleave("echo", [], (1, 32))
    assert comparison.figures == {}


_BURN = """
import sys, time
for line in sys.stdin:
    until = time.process_time() + float(line)
    while time.process_time() < until: pass
    print(flush=True)
"""


@pytest.mark.nightly
def test_a_warm_up_precedes_the_load_whose_cpu_time_is_counted(comparison):
    seen: list[LoadProfile] = []
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _BURN], **streams) as process:

        def measure(load: LoadProfile) -> LoadResult:
            seen.append(load)
            process.stdin.write(f"{0.2 if load.seconds == comparison.seconds else 1.0}\n")
            process.stdin.flush()
            process.stdout.readline()
            return LoadResult("asyncio", 32, 1.0, 10, 10, 0.1, 0.1, 0.1, 0.1)

        comparison.add(Case("echo", 32), Contender("a", measure, Peer("It", "", pid=process.pid)))
        process.kill()
    assert [(load.connections, load.seconds, load.warmup) for load in seen] == [(32, 0.5, 0), (32, 0.1, 0)]
    (parts,) = comparison.cpu[Case("echo", 32)]["a"]
    assert list(parts) == ["other"]
    assert 0.015 < parts["other"] < 0.05  # of ten requests


@pytest.mark.nightly
def test_the_bare_loop_counts_full_batches():
    result = bare_loop("mlp", 1).measure(LoadProfile(seconds=0.2))
    assert result.requests > 0
    assert result.requests % 16 == 0
    assert result.seconds >= 0.2


@pytest.mark.nightly
def test_the_facts_of_the_machine_name_its_cores_and_versions():
    facts = suite.machine()
    assert "cores" in facts["machine"]
    assert "torch" in facts["versions"]


@pytest.mark.nightly
def test_a_group_or_a_server_that_does_not_exist_is_refused():
    import typer

    app = typer.Typer()
    app.command()(suite.main)
    for option in ("--only", "--others"):
        refused = CliRunner().invoke(app, [option, "fastapi,echo,mpl"])
        assert refused.exit_code == 2
        assert "mpl" in refused.output


@pytest.mark.nightly
def test_every_target_is_of_a_group_that_is_measured():
    assert {target.case.group.partition(",")[0] for target in report.TARGETS} <= set(suite.GROUPS)
