"""Interleaved rounds of measurements, and what is measured of a server beside its load."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

from serve_app.load_test import LoadProfile, LoadRequest, LoadResult, send, wrk
from tests.benchmarks import cpu_time
from tests.benchmarks.archives import MODELS
from tests.benchmarks.report import Case, Footprint
from tests.benchmarks.servers import Peer, PeerFailed
from tests.benchmarks.targets import Contender, ask

DELAYS = (0, 1, 5, 10, 50, 100)  # milliseconds of max_batch_delay that TorchServe is tried with
_WARMUP = 0.5  # seconds of the same load before; wrk runs for half a second longer


class Rounds:
    """One run: what was measured so far, and what could not be."""

    def __init__(self, folder: Path, rounds: int, seconds: float, progress: Progress) -> None:
        self.folder, self.rounds, self.seconds, self.progress = folder, rounds, seconds, progress
        self.figures: dict[Case, dict[str, list[LoadResult]]] = {}
        self.cpu: dict[Case, dict[str, list[cpu_time.Parts]]] = {}
        self.footprints: list[Footprint] = []
        self.notes: list[str] = []
        self.sections: dict[str, str] = {}  # tables of groups with figures of their own
        self.archives: dict[str, Path] = {}

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.progress.console.print(text, style="yellow", markup=False, highlight=False)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Report a failure of one peer, which costs only its own rows."""
        try:
            yield
        except (PeerFailed, wrk.WrkError) as error:
            self.note(str(error))

    def interleave(self, group: str, contenders: Sequence[Contender], connections: Sequence[int]) -> None:
        """Measure A B C, A B C, … under each number of connections."""
        if not contenders:
            return
        task = self.progress.add_task(group, total=self.rounds * len(contenders) * len(connections))
        for count in connections:
            for _ in range(self.rounds):
                for contender in contenders:
                    self.progress.update(task, description=f"{group}, {count} connections: {contender.name}")
                    self.add(Case(group, count), contender)
                    self.progress.advance(task)
        self.progress.update(task, description=group)

    def add(self, case: Case, contender: Contender) -> None:
        """Measure a contender once, after a warm-up that is not counted.

        The CPU time of its processes is that of the measured load alone.
        """
        with self.going_on():
            load = LoadProfile(connections=case.connections or 1, seconds=self.seconds, warmup=1.0)
            if contender.peer is not None:
                contender.measure(replace(load, seconds=_WARMUP, warmup=0))
                load = replace(load, warmup=0)
            before = cpu_time.read(contender.processes())
            result = contender.measure(load)
            spent = cpu_time.spent(before, cpu_time.read(contender.processes()))
            self.figures.setdefault(case, {}).setdefault(contender.name, []).append(result)
            if spent and result.requests:
                each = {part: seconds / result.requests for part, seconds in spent.items()}
                self.cpu.setdefault(case, {}).setdefault(contender.name, []).append(each)
            shown = f"{case.group} {case.connections:>3} {contender.name}: {result.throughput:,.0f}/s"
            shown += f", p99 {result.p99 * 1000:.2f} ms, {result.failed} errors"
            self.progress.console.print(shown, highlight=False)

    # What each server serves

    def serve(self, peer: Peer, name: str, model: str, **how: int) -> str:
        return peer.register(self.archives[model], f"bench_{name}", **how)

    def footprint(self, peer: Peer, *, models: bool = True) -> None:
        """Memory and start of a server that has just been started."""
        task = self.progress.add_task(f"memory: {peer.name}", total=None)
        first = with_model = per_worker = math.nan
        if models:
            ask(self.serve(peer, "memory", "mlp", batch_size=16), "mlp")
            first = time.monotonic() - peer.began
            time.sleep(2)
            with_model, _ = peer.memory()
            peer.scale("bench_memory", 3)
            time.sleep(2)
            per_worker = (peer.memory()[0] - with_model) / 2
            peer.unregister("bench_memory")
        time.sleep(3)
        idle, counted = peer.memory()
        cpu, count = peer.idle_cpu(), len(peer.processes())
        self.footprints.append(
            Footprint(peer.name, peer.ready_seconds, first, idle, with_model, per_worker, counted, cpu, count)
        )
        self.progress.remove_task(task)

    def best_delay(self, peer: Peer, workers: int, connections: int) -> int:
        """Return the max_batch_delay with which TorchServe serves the mlp best under so many connections."""
        found = {}
        task = self.progress.add_task(
            f"tuning {peer.name}: {workers} workers, {connections}", total=len(DELAYS)
        )
        for delay in DELAYS:
            url = self.serve(peer, "tuning", "mlp", workers=workers, batch_size=16, max_batch_delay=delay)
            request = LoadRequest(url, body=MODELS["mlp"].body)
            load = LoadProfile(connections=connections, seconds=min(2.0, self.seconds), warmup=1)
            found[delay] = send(request, load).throughput
            self.progress.advance(task)
        peer.unregister("bench_tuning")
        self.progress.remove_task(task)
        best = max(found, key=found.__getitem__)
        tried = ", ".join(f"{delay} ms {rate:,.0f}/s" for delay, rate in found.items())
        self.note(
            f"TorchServe's best max_batch_delay for the mlp with workers: {workers} and connections:"
            f" {connections} is {best} ms, and so it was measured ({tried})."
        )
        return best
