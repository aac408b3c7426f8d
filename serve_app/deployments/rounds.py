"""The rounds: look at what runs, note it, and take the steps that make it what should run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from serve_app.control import capacity
from serve_app.control import registry as change
from serve_app.control.admission import Admission
from serve_app.control.reconciler import ATTEMPT, Deploy, Reconciler, Seen, is_dead
from serve_app.control.registry import Desired
from serve_app.control.vitals import Vitals
from serve_app.deployments import options
from serve_app.deployments.ledger import Ledger
from serve_app.errors import StartFailed
from serve_app.settings import Settings
from serve_app.telemetry import last_words
from serve_app.telemetry.last_words import Death
from serve_app.telemetry.metrics import Meters
from serve_app.types import ModelRef, ModelSpec, ModelStatus, Progress

log = logging.getLogger("torchrelay.rounds")
T = TypeVar("T")

_BUSY_PERIOD = 0.25  # seconds between rounds while something is starting or stopping
_PLACEMENT = 30.0  # seconds that a replica may wait for a place, beyond its startup_timeout


class Rounds:
    """``ledger`` is set before ``run`` begins; from then on this is the only one that deploys."""

    ledger: Ledger

    def __init__(self, vitals: Vitals, admission: Admission, meters: Meters, settings: Settings) -> None:
        self.booted = False  # what start-up should load is in the registry
        self._vitals = vitals
        self._admission = admission
        self._meters = meters
        self._settings = settings
        self._serve = ThreadPoolExecutor(1, thread_name_prefix="serve")  # Serve's client is not thread-safe
        self._reconciler = Reconciler(self._application, self._config_of, options.autoscaling)
        self._seen: dict[str, Seen] = {}
        self._lingering: dict[str, Desired] = {}  # applications of removed workflows that still answer calls
        self._leaving: dict[str, str] = {}  # applications of removed versions, and the digests that they may still need
        self._tidying = asyncio.Lock()
        self._admitting = 0
        self._state: dict[str, object] = {}  # of what was seen while something moved, and when it last changed
        self._changed = 0.0
        self._kick = asyncio.Event()
        self._passed = asyncio.Event()

    async def run(self) -> None:
        while True:
            self._kick.clear()  # before the round: what comes in its midst begins the next one
            try:
                busy = await self._round()
            except Exception:
                log.exception("a round failed; the next one follows")
                busy = False
            period = _BUSY_PERIOD if busy else self._settings.control.reconcile_period
            kicked = asyncio.ensure_future(self._kick.wait())
            try:
                await asyncio.wait({kicked}, timeout=period)  # wait_for may lose a cancel that comes with the kick
            finally:
                kicked.cancel()

    def soon(self) -> None:
        """Begin the next round at once."""
        self._kick.set()

    async def next(self) -> None:
        """Wait for the end of the round that is under way, or of the next one."""
        await self._passed.wait()

    async def in_serve(self, function: Callable[..., T], *args: Any) -> T:
        """Call what asks Ray Serve, in the thread that does so."""
        return await asyncio.get_running_loop().run_in_executor(self._serve, function, *args)

    async def alive(self) -> set[str]:
        """The processes that read the table."""
        return await self.in_serve(self._reconciler.sources)

    async def running_now(self) -> set[str]:
        """Those of them that run already, as they do when Management comes back."""
        return await self.in_serve(self._reconciler.sources, ("RUNNING",))

    @contextlib.asynccontextmanager
    async def archives_kept(self) -> AsyncIterator[None]:
        """Until the end of the block every archive stays where it is."""
        async with self._tidying:
            self._admitting += 1
        try:
            yield
        finally:
            self._admitting -= 1

    # Of single versions

    def removed(self, spec: ModelSpec) -> None:
        """Forget what was known of a version; its archive goes when its replicas are gone."""
        self._vitals.forget(spec.ref)
        self._leaving[spec.ref.app] = spec.digest

    def linger(self, spec: ModelSpec) -> None:
        """Let what runs of a version stay, whatever becomes of it in the registry, until ``let_go``."""
        if spec.min_workers or spec.max_workers:
            self._lingering[spec.ref.app] = Desired(spec, None)

    def let_go(self, spec: ModelSpec) -> None:
        """A version that lingered has nothing more to do: what was known of it is forgotten, and it goes."""
        self._lingering.pop(spec.ref.app, None)
        if spec.digest:
            self.removed(spec)
        self.soon()

    def forgive(self, ref: ModelRef) -> None:
        """Begin anew with a version: somebody has changed what was asked of it."""
        self._vitals.forgive(ref)

    def leaving(self, ref: ModelRef) -> bool:
        """Whether what runs under the version's name is still one that was removed."""
        return ref.app in self._leaving or ref.app in self._lingering

    def running(self, ref: ModelRef) -> int:
        seen = self._seen.get(ref.app)
        return seen.running if seen is not None else 0

    def status(self, ref: ModelRef) -> ModelStatus:
        """What is known of a version. A replica whose process is gone is not ready, whatever was seen last."""
        status = self._vitals.statuses.get(ref, ModelStatus())
        workers = tuple(replace(w, ready=False) if w.ready and is_dead(w) else w for w in status.workers)
        if workers == status.workers:
            return status
        self.soon()
        running = sum(worker.ready for worker in workers)
        phase = status.phase if running or status.phase != "ready" else "loading"
        return replace(status, phase=phase, replicas=running, workers=workers)

    async def until_running(
        self, spec: ModelSpec, startup_timeout: float, meanwhile: Callable[[], Awaitable[None]]
    ) -> Progress:
        """Wait until as many replicas run as ``spec`` says, no more and no fewer. Raises StartFailed."""
        ref, low, high = spec.ref, spec.min_workers, spec.max_workers
        deadline = time.monotonic() + startup_timeout + _PLACEMENT
        while True:
            if (error := self._vitals.failure(ref)) is not None:
                raise error
            running = self.running(ref)
            if low <= running <= high:
                return Progress(ref, running, "done")
            if time.monotonic() > deadline:
                if running:
                    return Progress(ref, running, "partial")
                raise StartFailed(ref.name, ref.version, await self._why_not(spec))
            await meanwhile()
            await self.next()

    async def lacking(self, spec: ModelSpec) -> dict[str, dict[str, Any]]:
        """What is not free of that which a version without a place asks for, by kind of resource."""
        seen = self._seen.get(spec.ref.app)
        if seen is None or sum(worker.pid > 0 for worker in seen.workers) >= spec.min_workers:
            return {}
        return capacity.lacking(spec, await self.in_serve(self._reconciler.free))

    def bury(self, deaths: Iterable[Death], desired: Mapping[str, Desired] | None = None) -> None:
        """Keep why replicas died, of versions that should run."""
        desired = change.desired(self.ledger.registry) if desired is None else desired
        for death in deaths:
            want = desired.get(death.app)
            if want is not None and want.spec.digest == death.digest:
                log.error("%s: replica %s died. %s", death.app, death.replica, death.why)
                self._vitals.died(want.spec, death)

    async def _why_not(self, spec: ModelSpec) -> str:
        seen = self._seen.get(spec.ref.app)
        if short := await self.lacking(spec):
            said = capacity.in_words(spec, short)
        else:
            said = seen.message if seen is not None else "Ray Serve has not begun"
        return f"no replica runs: {said or 'it waits for a place with enough free CPUs and GPUs'}"

    # One round

    async def _round(self) -> bool:
        """Look, note, act. True while something is on its way."""
        desired = {**self._lingering, **change.desired(self.ledger.registry)}
        seen = await self.in_serve(self._reconciler.look)
        self.bury(await asyncio.to_thread(last_words.dead, self._settings.last_words), desired)
        self._note(desired, seen)
        tried = {app: want for app, want in desired.items() if self._vitals.tried(want.spec.ref)}
        steps = await self.in_serve(self._reconciler.act, tried, seen)
        await self._discard(seen)
        self.ledger.publish()
        passed, self._passed = self._passed, asyncio.Event()
        passed.set()
        moving = any(app not in seen or seen[app].running != seen[app].replicas for app in tried)
        return bool(steps) or (moving and self._goes_on(seen)) or any(app not in desired for app in seen)

    def _goes_on(self, seen: Mapping[str, Seen]) -> bool:
        """Whether anything has changed of late: a replica without a place may wait for days, and is watched calmly."""
        now = time.monotonic()
        state = {app: (s.status, s.replicas, tuple((w.id, w.ready) for w in s.workers)) for app, s in seen.items()}
        if state != self._state:
            self._state, self._changed = state, now
        return now - self._changed < _PLACEMENT

    def _note(self, desired: Mapping[str, Desired], seen: dict[str, Seen]) -> None:
        known = set(self._vitals.statuses)
        self._vitals.note(desired, seen, self._seen)
        self._seen = seen
        for app, want in desired.items():
            ref = want.spec.ref
            wanted = want.low if want.low == want.high else seen[app].replicas if app in seen else 0
            self._meters.replicas(ref.name, ref.version, self._vitals.statuses[ref].replicas, wanted)
        for ref in known - set(self._vitals.statuses):
            self._meters.forget(ref.name, ref.version)
        self.ledger.settled = self.ledger.settled or (self.booted and self._vitals.settled(desired))

    async def _discard(self, seen: Mapping[str, Seen]) -> None:
        """Drop the archives of versions that were removed and whose replicas are gone, and those that were refused."""
        for app in [app for app in self._leaving if app not in seen]:
            self._admission.discard(self._leaving.pop(app))
        async with self._tidying:
            if not self._admitting:
                specs = [*self.ledger.registry, *(want.spec for want in self._lingering.values())]
                used = frozenset([*(spec.digest for spec in specs), *self._leaving.values()])
                await asyncio.to_thread(self._admission.tidy, used)

    def _application(self, step: Deploy) -> Any:
        want = step.desired
        return options.model_app(want.spec, self._settings, step.scaling, {ATTEMPT: step.attempt})

    def _config_of(self, want: Desired) -> Mapping[str, Any]:
        return options.user_config(want.spec, self._settings)
