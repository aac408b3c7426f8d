"""Disturb running servers, and print a table of what each fault cost.

``python -m tests.chaos`` repeats all faults for 20 minutes; ``--only "kill HAProxy"`` (repeatable) selects
some, and ``--short`` those of the short form, once. The exit code is 1 where a documented limit was exceeded.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import report
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.run import Result, run_fault
from tests.chaos.setups import SETUPS, Setup, Skipped

LONG_KILLS, SHORT_KILLS = 100, 5


class ChaosRun:
    """The results of all faults that were applied, by setup; one server after the other."""

    def __init__(self, folder: Path | None = None) -> None:
        self.results: list[Result] = []
        self.skipped: dict[str, str] = {}
        self.orphans: dict[str, list[str]] = {}
        self._folder = folder

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results) and not any(self.orphans.values())

    def run(self, faults: Sequence[Fault], seconds: float = 0.0, kills: int = SHORT_KILLS) -> None:
        """Apply every fault once, and then all of a setup again until its share of ``seconds`` is over."""
        until = time.monotonic() + seconds
        names = list(dict.fromkeys(fault.setup for fault in faults))
        for index, name in enumerate(names):
            share = (until - time.monotonic()) / (len(names) - index)
            self._run_setup(name, [fault for fault in faults if fault.setup == name], share, kills)

    def _run_setup(self, name: str, faults: Sequence[Fault], seconds: float, kills: int) -> None:
        until, seed = time.monotonic() + seconds, 0
        try:
            with SETUPS[name]() as setup:
                setup.kills = kills
                while True:
                    for fault in faults:
                        seed += 1
                        if seed <= len(faults) or time.monotonic() < until:
                            self._run_fault(setup, fault, seed)
                    if time.monotonic() >= until:
                        break
                setup.server.stop()
                self.orphans[name] = setup.server.orphans()
        except Skipped as reason:
            self.skipped.update({fault.name: str(reason) for fault in faults})
        self._write()

    def _run_fault(self, setup: Setup, fault: Fault, seed: int) -> None:
        print(f"{fault.name} …", end=" ", flush=True)
        try:
            result = run_fault(setup, fault, seed=seed)
        except Skipped as reason:
            self.skipped[fault.name] = str(reason)
            print("skipped:", reason)
            return
        except Exception as error:  # one fault must not end the others
            traceback.print_exc()
            result = Result(fault.name, problems=[f"{type(error).__name__}: {error}"])
        self.results.append(result)
        problems = "; ".join(result.problems) or "passed"
        print(
            f"unavailable {result.unavailable} s, recovery {result.recovery} s, {result.failed}: {problems}"
        )
        self._write()

    def _write(self) -> None:
        if self._folder is not None:
            report.write(self._folder, self.results, self.skipped, self.orphans)


def main() -> int:
    """Run the selected faults and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--only", action="append", help="a fault's name, or its beginning (repeatable)")
    parser.add_argument("--short", action="store_true", help="the faults of the short form, once each")
    parser.add_argument("--kills", type=int, help="of Management at random moments")
    parser.add_argument("--output", type=Path, default=Path("chaos"), help="the folder of the reports")
    options = parser.parse_args()
    selected = [
        fault
        for fault in FAULTS
        if (not options.only or fault.name.startswith(tuple(options.only)))
        and (fault.short or not options.short)
    ]
    if not selected:
        parser.error(f"no such fault; there are: {', '.join(fault.name for fault in FAULTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which stops the server, too
    run = ChaosRun(options.output)
    run.run(
        selected,
        0.0 if options.short else options.seconds,
        options.kills or (SHORT_KILLS if options.short else LONG_KILLS),
    )
    print(report.markdown(run.results, run.skipped, run.orphans))
    return 0 if run.passed else 1


if __name__ == "__main__":
    sys.exit(main())
