"""Management: the only writer. It keeps the registry, and makes the cluster agree with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from ray import serve

from serve_app.control import registry as change
from serve_app.control.admission import Admission
from serve_app.control.board import Board, Nudge
from serve_app.control.database import Database
from serve_app.control.reconciler import ATTEMPT, Deploy, Reconciler, Seen
from serve_app.control.registry import Desired, Registry
from serve_app.control.vitals import Vitals
from serve_app.controlplane import ControlPlane
from serve_app.dataplane import TableReader
from serve_app.deployments import options, serve_env
from serve_app.deployments.listener import Listener
from serve_app.deployments.remote import Remotes
from serve_app.doors.app import management_app, metrics_app
from serve_app.errors import HandlerFailed, NotFound, NotYet, NoWorker, RelayError, StartFailed, Unavailable
from serve_app.settings import Settings
from serve_app.telemetry import logs
from serve_app.telemetry.metrics import Meters, Sample, Sum
from serve_app.types import (
    Call,
    Description,
    ModelRef,
    ModelSpec,
    ModelStatus,
    Progress,
    Registration,
    ReplyStream,
    Table,
)

log = logging.getLogger("torchrelay.management")
T = TypeVar("T")

_BUSY_PERIOD = 0.25  # seconds between passes while something is starting or stopping
_PLACEMENT = 30.0  # seconds that a replica may wait for a place, beyond its startup_timeout



@serve.deployment
class Management:
    """One replica, on the head node. What it has acknowledged is in the database."""

    async def __init__(self, settings: Settings) -> None:
        logs.configure(settings, logs.Speaker("Management"))
        if lost := serve_env.complaint(os.environ):
            log.warning("%s", lost)
        self._settings = settings
        settings.state_dir.mkdir(parents=True, exist_ok=True)
        self._serve = ThreadPoolExecutor(1, thread_name_prefix="serve")  # Serve's client is not thread-safe
        self._database = await asyncio.to_thread(Database, settings.database_url)
        self._registry: Registry = await asyncio.to_thread(self._database.load)
        self._admission = await asyncio.to_thread(Admission, settings)
        self._meters = Meters()
        self._total = Sum()
        self._board = Board(self._total)
        self._remotes = Remotes(TableReader(), settings)
        self._reconciler = Reconciler(self._application, self._config_of)
        self._writing = asyncio.Lock()
        self._tidying = asyncio.Lock()
        self._admitting = 0
        self._kick = asyncio.Event()
        self._passed = asyncio.Event()
        self._seen: dict[str, Seen] = {}
        self._vitals = Vitals()
        self._leaving: dict[str, str] = {}  # applications of removed versions, and the digests that they may still need
        self._booted = False
        self._settled = False
        m = settings.management
        api = management_app(ControlPlane(self, settings), settings)
        self._listeners = [
            Listener(api, m.host, m.port, "management.port"),
            Listener(metrics_app(self._render, settings), m.metrics_host, m.metrics_port, "management.metrics_port"),
        ]
        for listener in self._listeners:
            await listener.open()
        self._publish()
        self._tasks = [asyncio.create_task(self._boot()), asyncio.create_task(self._run())]

    # What readers ask

    async def poll(self, source: str, generation: int, samples: list[Sample] | None) -> Table | Nudge | None:
        """A reader's long poll; see control/board.py."""
        return await self._board.poll(source, generation, samples)

    async def leave(self, source: str, samples: list[Sample]) -> None:
        self._board.leave(source, samples)

    async def start_failed(self, ref: ModelRef, digest: str, error: StartFailed) -> None:
        """A replica could not load its model, whose archive has ``digest``; here is the author's traceback."""
        with contextlib.suppress(NotFound):  # removed meanwhile
            spec = change.find(self._registry, ref.name, ref.version)
            if spec.digest == digest:
                self._vitals.failed(spec, error)
                self._kick.set()

    async def pause_before_start(self, ref: ModelRef) -> float:
        """Seconds that a new replica should wait, because the ones before it crashed."""
        self._kick.set()
        await self._next_pass()
        return self._vitals.pause(ref)

    async def archive(self, ref: ModelRef, offset: int, length: int) -> bytes:
        """A piece of a version's archive, for a node that does not share this one's disk; empty at its end."""
        spec = change.find(self._registry, ref.name, ref.version)
        return await asyncio.to_thread(self._admission.read, spec, offset, length)

    # What the control plane asks (controlplane.Keeper)

    async def register(self, registration: Registration) -> Progress:
        async with self._admitted(registration) as spec:
            while spec.ref.app in self._leaving:  # what runs under its name is still the one that was removed
                await self._next_pass()
            async with self._writing:
                with contextlib.suppress(NotYet):  # a reader that has not heard of it only says so a little longer
                    await self._commit(change.register(self._registry, spec))
        if spec.min_workers == 0:
            return Progress(spec.ref, 0, "done")
        if not registration.wait:
            return Progress(spec.ref, 0, "processing")
        try:
            return await self._until_running(spec.ref, spec.min_workers, spec.startup_timeout)
        except StartFailed:
            async with self._writing:
                with contextlib.suppress(NotYet):
                    await self._commit(change.unregister(self._registry, spec.name, spec.version)[0])
                self._removed(spec)
            raise

    async def scale(self, model: str, version: str | None, low: int, high: int, wait: bool) -> Progress:
        async with self._writing:
            after, ref = change.scale(self._registry, model, version, low, high)
            self._vitals.forgive(ref)
            await self._commit(after)
        spec = change.find(after, ref.name, ref.version)
        if not wait:
            return Progress(ref, self._running(ref), "processing")
        return await self._until_running(ref, low, spec.startup_timeout)

    async def set_default(self, model: str, version: str) -> ModelRef:
        async with self._writing:
            after, ref = change.set_default(self._registry, model, version)
            await self._commit(after)
        return ref

    async def unregister(self, model: str, version: str | None) -> ModelRef:
        async with self._writing:
            spec = change.find(self._registry, model, version)
            after, ref = change.unregister(self._registry, model, version)
            await self._commit(after)
            self._removed(spec)
        return ref

    async def describe(self, model: str, version: str | None) -> Description:
        spec = change.find(self._registry, model, version)
        await self._board.collect(1.0, self._alive)
        pending = int(self._total.total("torchrelay_queue_depth", model=spec.name, version=spec.version))
        default = self._registry.models[model].default == spec.version
        return Description(spec, self._vitals.statuses.get(spec.ref, ModelStatus()), default, pending)

    async def metadata(self, model: str, version: str | None) -> dict[str, Any]:
        """What the handler says of itself: one replica's answer to a ``describe`` call, empty where it is no object."""
        ref = change.find(self._registry, model, version).ref
        if not self._running(ref):
            raise NoWorker(ref.name, version, "no replica runs that could describe it")
        row = self._board.table.models[ref.name].versions[ref.version]
        try:
            reply = await self._remotes(ref, row).infer(Call(ref.name, ref.version, kind="describe"))
        except HandlerFailed as error:
            # Most handlers know no such call and stumble over its empty row: they say nothing, and that is no fault.
            log.info("%s describes nothing of itself: %s", ref.app, error)
            return {}
        if isinstance(reply, ReplyStream):
            await reply.aclose()
            return {}
        try:
            said = orjson.loads(reply.body)
        except orjson.JSONDecodeError:
            return {}
        return said if isinstance(said, dict) else {}

    async def versions(self, model: str) -> list[str]:
        change.find(self._registry, model, None)
        return sorted(self._registry.models[model].versions)

    async def models(self) -> list[tuple[str, str]]:
        records = sorted(self._registry.models.items())
        return [(name, record.versions[record.default].url) for name, record in records]

    # Changes

    async def _commit(self, after: Registry) -> None:
        """Store a change, put it in force (and wait until it is), and only then return.

        Raises Unavailable where it could not be stored, NotYet where a live reader lags behind it.
        """
        try:
            await asyncio.to_thread(self._database.save, self._registry, after)
        except Unavailable:
            # The connection may have gone after the commit: what is stored is what holds.
            self._registry = await asyncio.to_thread(self._database.load)
            self._publish()
            raise
        self._registry = after
        self._publish()
        self._kick.set()
        late = await self._board.in_force(self._settings.control.acknowledge_timeout, self._alive)
        if late:
            raise NotYet(f"Stored, and not yet in force at {len(late)} of the replicas that run.")

    def _removed(self, spec: ModelSpec) -> None:
        """Forget what was known of a version; its archive goes when its replicas are gone."""
        self._vitals.forget(spec.ref)
        self._leaving[spec.ref.app] = spec.digest

    @contextlib.asynccontextmanager
    async def _admitted(self, registration: Registration, at_startup: bool = False) -> AsyncIterator[ModelSpec]:
        """A new version's spec; until the end of the block its archive stays where it is."""
        async with self._tidying:
            self._admitting += 1
        try:
            yield await asyncio.to_thread(self._admission.admit, registration, at_startup)
        finally:
            self._admitting -= 1

    def _publish(self) -> None:
        healthy = {spec.ref: self._vitals.healthy(spec) for spec in self._registry}
        now = self._board.table
        table = change.table(self._registry, self._vitals.statuses, healthy, now.generation, self._settled)
        if table != now or now.generation == 0:
            self._board.hang(Table(self._board.next_generation(), table.models, table.settled))

    async def _until_running(self, ref: ModelRef, count: int, startup_timeout: int) -> Progress:
        """Wait until ``count`` replicas run, no more and no fewer. Raises StartFailed."""
        deadline = time.monotonic() + startup_timeout + _PLACEMENT
        while True:
            if (error := self._vitals.failure(ref)) is not None:
                raise error
            running = self._running(ref)
            if running == count:
                return Progress(ref, running, "done")
            if time.monotonic() > deadline:
                if running:
                    return Progress(ref, running, "partial")
                raise StartFailed(ref.name, ref.version, self._why_not(ref))
            await self._next_pass()

    def _running(self, ref: ModelRef) -> int:
        seen = self._seen.get(ref.app)
        return seen.running if seen is not None else 0

    def _why_not(self, ref: ModelRef) -> str:
        seen = self._seen.get(ref.app)
        said = seen.message if seen is not None else "Ray Serve has not begun"
        return f"no replica runs: {said or 'it waits for a place with enough free CPUs and GPUs'}"

    # The loop

    async def _run(self) -> None:
        while True:
            self._kick.clear()  # before the pass: what comes in its midst begins the next one
            try:
                busy = await self._pass()
            except Exception:
                log.exception("a pass of the reconciler failed; the next one follows")
                busy = False
            period = _BUSY_PERIOD if busy else self._settings.control.reconcile_period
            try:
                await asyncio.wait_for(self._kick.wait(), period)
            except asyncio.TimeoutError:
                continue

    async def _pass(self) -> bool:
        """Look, note, act. True while something is on its way."""
        desired = change.desired(self._registry)
        seen = await self._in_serve(self._reconciler.look)
        self._note(desired, seen)
        tried = {app: want for app, want in desired.items() if self._vitals.tried(want.spec.ref)}
        steps = await self._in_serve(self._reconciler.act, tried, seen)
        await self._discard(seen)
        self._publish()
        passed, self._passed = self._passed, asyncio.Event()
        passed.set()
        moving = any(app not in seen or seen[app].running != want.low for app, want in tried.items())
        return bool(steps) or moving or any(app not in desired for app in seen)

    async def _discard(self, seen: Mapping[str, Seen]) -> None:
        """Drop the archives of versions that were removed and whose replicas are gone, and those that were refused."""
        for app in [app for app in self._leaving if app not in seen]:
            self._admission.discard(self._leaving.pop(app))
        async with self._tidying:
            if not self._admitting:
                used = frozenset([*(spec.digest for spec in self._registry), *self._leaving.values()])
                await asyncio.to_thread(self._admission.tidy, used)

    async def _next_pass(self) -> None:
        await self._passed.wait()

    def _note(self, desired: Mapping[str, Desired], seen: dict[str, Seen]) -> None:
        known = set(self._vitals.statuses)
        self._vitals.note(desired, seen, self._seen)
        self._seen = seen
        for want in desired.values():
            ref = want.spec.ref
            self._meters.replicas(ref.name, ref.version, self._vitals.statuses[ref].replicas, want.low)
        for ref in known - set(self._vitals.statuses):
            self._meters.forget(ref.name, ref.version)
        self._settled = self._settled or (self._booted and self._vitals.settled(desired))

    async def _boot(self) -> None:
        """Register what the model store holds: what is new there, and what has changed."""
        try:
            for archive in await asyncio.to_thread(self._admission.at_startup):
                try:
                    async with self._admitted(archive, at_startup=True) as spec, self._writing:
                        own = self._settings.control.models.get(spec.name, {}).get(spec.version)
                        after = change.put(self._registry, spec, own is not None and own.default_version)
                        if after is not self._registry:
                            with contextlib.suppress(NotYet):
                                await self._commit(after)
                except RelayError as error:
                    log.error("%s was not loaded: %s", archive.url, error)
        except Exception:
            log.exception("the model store could not be read")
        finally:
            self._booted = True
            self._kick.set()

    def _application(self, step: Deploy) -> Any:
        want = step.desired
        return options.model_app(want.spec, self._settings, want.low, {ATTEMPT: step.attempt})

    def _config_of(self, want: Desired) -> Mapping[str, Any]:
        return options.user_config(want.spec, self._settings)

    async def _in_serve(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._serve, function, *args)

    async def _alive(self) -> set[str]:
        return await self._in_serve(self._reconciler.sources)

    async def _render(self) -> bytes:
        await self._board.collect(1.0, self._alive)
        self._total.put("management", self._meters.samples())
        return self._total.render()

    async def check_health(self) -> None:
        for task in self._tasks:
            if task.done() and task.exception() is not None:
                raise RuntimeError("the reconciler ended") from task.exception()

    async def __del__(self) -> None:
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners:
            await listener.close()
