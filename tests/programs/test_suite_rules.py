"""The rules of a run: skips state what is missing, and only listed tests are run again."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from tests.support import suite_rules
from tests.support.suite_rules import FLAKY, Flaky, check_flaky, shared_server

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SETTINGS = """
[pytest]
markers =
    slow: long
    nightly: longer
    cluster(fixture): a server
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a folder of tests with the rules of this suite."""
    pytester.makeini(SETTINGS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest("pytest_plugins = ['tests.support.suite_rules']")
    return pytester


def run(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-p", "no:schemathesis", "-p", "no:cacheprovider", *options)


@pytest.mark.parametrize("processes", [(), ("-n", "1")])
def test_a_skip_states_what_it_needs(suite: pytest.Pytester, processes: tuple[str, ...]) -> None:
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.skipif(True, reason="needs a printer")
        def test_printer(): ...

        def test_package():
            pytest.importorskip("no_such_package")

        @pytest.mark.xfail(reason="a known fault")
        def test_known():
            assert False

        def test_time():
            pytest.skip("no time is left")
        """
    )
    result = run(suite, *processes)
    result.assert_outcomes(skipped=2, xfailed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_time: skipped because 'no time is left'; a skip states what it needs.",
            "*= skipped tests =*",
            "   1  could not import 'no_such_package'*",
            "      *::test_package",
            "   1  needs a printer",
            "      *::test_printer",
        ]
    )


COUNTED = """
from pathlib import Path

def test_{name}():
    runs = Path("{name}.txt")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert len(runs.read_text()) > 1, "the first run"
"""


def test_only_listed_tests_are_run_again(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_listed=COUNTED.format(name="listed"), test_other=COUNTED.format(name="other"))
    suite.makeconftest(
        """
        from datetime import date
        pytest_plugins = ["tests.support.suite_rules"]

        def pytest_configure():
            from tests.support import suite_rules
            suite_rules.FLAKY = (
                suite_rules.Flaky("test_listed.py::test_listed", "the disk is slow", date(2026, 1, 2)),
            )
        """
    )
    result = run(suite)
    outcomes = result.parseoutcomes()
    assert outcomes == {"passed": 1, "failed": 1, "rerun": 1}
    result.stdout.fnmatch_lines(
        [
            "*= flaky tests that were run again =*",
            "test_listed.py::test_listed: the disk is slow (since 2026-01-02)",
        ]
    )


def test_tiers_and_shared_servers(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_plain="def test_plain(): ...",
        test_night="import pytest\npytestmark = pytest.mark.nightly\nraise SystemExit('it was imported')",
        test_mixed="import pytest\n@pytest.mark.slow\ndef test_slow(): ...\ndef test_quick(): ...",
        test_plain_server="import pytest\npytestmark = pytest.mark.cluster",
        test_observed='import pytest\npytestmark = [pytest.mark.slow, pytest.mark.cluster("observed")]',
        test_own="import pytest\npytestmark = [pytest.mark.cluster, pytest.mark.own_server]",
    )
    run(suite, "-m", "not slow and not nightly").assert_outcomes(passed=2, deselected=1)
    run(suite, "-m", "slow and not nightly").assert_outcomes(passed=1, deselected=1)
    servers = {
        name: shared_server(suite.path / f"test_{name}.py")
        for name in ("plain", "plain_server", "observed", "own")
    }
    assert servers == {"plain": None, "plain_server": "server", "observed": "observed", "own": None}


def test_the_list_of_flaky_tests_is_short_and_of_tests_that_exist() -> None:
    assert check_flaky(FLAKY, ROOT) == []
    here = "tests/programs/test_suite_rules.py::test_tiers_and_shared_servers"
    known = [Flaky(here, "", date(2026, 1, 1)), Flaky("tests/nowhere.py::test_x", "why", date(2026, 1, 1))]
    assert check_flaky(tuple(known), ROOT) == [
        f"{here} has no reason",
        "tests/nowhere.py::test_x does not exist",
    ]
    six = tuple(known[:1] * 6)
    assert "6 flaky tests, more than 5" in check_flaky(six, ROOT)
    assert suite_rules.MAX_FLAKY == 5
