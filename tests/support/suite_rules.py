"""Rules of a run of the tests: which files are collected, where they run, what may be skipped or run again.

A skip states what is missing (``needs chromium``); any other skip fails. A test that fails is run again only
if it is in ``FLAKY``. Both are listed at the end of the run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.shared_servers import SHARED_SERVERS

MAX_FLAKY = 5
TIERS = ("slow", "nightly")
SERVERS = ("server", "observed", None)  # fixtures of shared servers, in the order of their tests
# Seconds after which a test that hangs fails with the stacks of its threads.
TIMEOUTS = {"nightly": 1800, "slow": 600, "": 300}
_ALLOWED_SKIP = re.compile(r"(needs |could not import )")


class Flaky(NamedTuple):
    """A test that may be run once more: why, and since when."""

    test: str
    reason: str
    since: date


FLAKY: tuple[Flaky, ...] = ()


def check_flaky(known: tuple[Flaky, ...], root: Path) -> list[str]:
    """Return what is wrong with a list of flaky tests: its length, missing tests and missing reasons."""
    problems = [f"{len(known)} flaky tests, more than {MAX_FLAKY}"] if len(known) > MAX_FLAKY else []
    for flaky in known:
        file, _, name = flaky.test.partition("::")
        function = name.partition("[")[0].rpartition("::")[2]
        if not function or not (root / file).is_file() or f"def {function}(" not in (root / file).read_text():
            problems.append(f"{flaky.test} does not exist")
        if not flaky.reason:
            problems.append(f"{flaky.test} has no reason")
    return problems


@cache
def module_marks(file: Path) -> str:
    """Return the statement ``pytestmark = …`` of a file, or an empty string."""
    found = re.search(r"^pytestmark = (\[.*?\]|[^\[\n]*)$", file.read_text(), re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files without a test of the selected tier: importing them takes longer than some tiers."""
    if not collection_path.match("test_*.py"):
        return None
    selected, excluded = (
        config.option.markexpr.split(" ")[0],
        re.findall(r"not (\w+)", config.option.markexpr),
    )
    if any(f"pytest.mark.{mark}" in module_marks(collection_path) for mark in excluded):
        return True
    return (selected in TIERS and f"pytest.mark.{selected}" not in collection_path.read_text()) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of each shared server to the front, as they take longest, and set the limits of time."""
    items.sort(key=lambda item: SERVERS.index(shared_server(item.path)))
    for item in items:
        tier = next((tier for tier in reversed(TIERS) if item.get_closest_marker(tier)), "")
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUTS[tier]))
        if item.nodeid in {flaky.test for flaky in FLAKY}:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Turn a skip that does not state what it needs into a failure."""
    report: pytest.TestReport = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = skip_reason(report)
        if not _ALLOWED_SKIP.match(reason):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: skipped because {reason!r}; a skip states what it needs."
    return report


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the skipped tests by reason, and the flaky tests that were run again."""
    by_reason = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        by_reason[skip_reason(report)].append(report.nodeid)
    if by_reason:
        terminalreporter.section("skipped tests")
    for reason, tests in sorted(by_reason.items()):
        terminalreporter.write_line(f"{len(tests):>4}  {reason}")
        for test in sorted(tests):
            terminalreporter.write_line(f"      {test}")
    repeated = {report.nodeid for report in terminalreporter.stats.get("rerun", [])}
    if repeated:
        terminalreporter.section("flaky tests that were run again")
    for flaky in FLAKY:
        if flaky.test in repeated:
            terminalreporter.write_line(f"{flaky.test}: {flaky.reason} (since {flaky.since})")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return ServerScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Any:
    """Stop a shared server after the last test that uses it."""
    result = yield
    name = shared_server(item.path)
    if name and (nextitem is None or shared_server(nextitem.path) != name):
        SHARED_SERVERS.close(name)
    return result


def pytest_sessionfinish() -> None:
    SHARED_SERVERS.close()


class ServerScheduling(LoadScopeScheduling):
    """The distribution of tests file by file, where all files that share a server run on one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return shared_server(self.config.rootpath / file) or file


@cache
def shared_server(file: Path) -> str | None:
    """Return the fixture of the server that a file shares: ``pytest.mark.cluster("observed")``."""
    text = file.read_text()
    if "pytest.mark.cluster" not in text or "pytest.mark.own_server" in text:
        return None
    named = re.search(r"pytest\.mark\.cluster\(\"(\w+)\"\)", text)
    return named[1] if named else "server"
