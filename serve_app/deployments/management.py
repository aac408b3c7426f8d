"""Management: the only writer. It keeps the registry, and makes the cluster agree with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import orjson
import ray
from ray import serve
from ray.serve.context import _get_global_client

from serve_app import tls
from serve_app.control import registry as change
from serve_app.control.admission import Admission
from serve_app.control.board import Board, Nudge
from serve_app.control.database import Database
from serve_app.control.events import Events, Story
from serve_app.control.keys import Keys
from serve_app.control.reconciler import ATTEMPT, Deploy, Reconciler, Seen, is_dead
from serve_app.control.registry import Desired, Registry
from serve_app.control.vitals import Vitals
from serve_app.controlplane import ControlPlane
from serve_app.dataplane import TableReader
from serve_app.deployments import options, serve_env
from serve_app.deployments.keeper import QUESTIONS
from serve_app.deployments.listener import Listener
from serve_app.deployments.remote import Remotes
from serve_app.doors.app import management_app, metrics_app
from serve_app.errors import HandlerFailed, NotFound, NotYet, NoWorker, RelayError, StartFailed, Unavailable, WrongModel
from serve_app.runtime.environments import Environments
from serve_app.settings import INFERENCE_HOST, Settings
from serve_app.store.manifest import stem
from serve_app.telemetry import access_log, last_words, logs, system, torchserve
from serve_app.telemetry.last_words import Death
from serve_app.telemetry.metrics import Meters, Report, Sum
from serve_app.types import (
    Call,
    Description,
    Event,
    ModelRef,
    ModelSpec,
    ModelStatus,
    Progress,
    Registration,
    ReplyStream,
    Stage,
    Table,
    matches,
)

log = logging.getLogger("torchrelay.management")
T = TypeVar("T")

_BUSY_PERIOD = 0.25  # seconds between passes while something is starting or stopping
_PATIENCE = 2.0  # seconds without a place after which a story says what is missing
_LINE = 300  # characters of an installer's line that are told
_PLACEMENT = 30.0  # seconds that a replica may wait for a place, beyond its startup_timeout

_WHERE_THE_KEYS_ARE = """
######
Requests must show a key, because this server is not for this machine alone or because auth.mode says so.
The keys are in %s
A request shows one as "Authorization: Bearer KEY"; the inference key infers, the management key manages.
auth.mode: "off" opens every door to everybody.
######"""


def _inference_addresses() -> tuple[list[str], int]:
    """Where Ray Serve listens, and what `torchrelay start` put in front of it; a host that is not told may be any."""
    http = _get_global_client().http_config
    in_front = os.environ.get(INFERENCE_HOST)
    return [http.host or "0.0.0.0", *([in_front] if in_front else [])], http.port



@serve.deployment
class Management:
    """One replica, on the head node. What it has acknowledged is in the database."""

    @logs.told
    async def __init__(self, settings: Settings) -> None:
        logs.configure(settings, logs.Speaker("Management"))
        if lost := serve_env.complaint(os.environ):
            log.warning("%s", lost)
        self._settings = settings
        context = await asyncio.to_thread(tls.of_management, settings)
        settings.state_dir.mkdir(parents=True, exist_ok=True)
        self._serve = ThreadPoolExecutor(1, thread_name_prefix="serve")  # Serve's client is not thread-safe
        self._database = await asyncio.to_thread(Database, settings.database_url)
        self._registry: Registry = await asyncio.to_thread(self._database.load)
        self._admission = await asyncio.to_thread(Admission, settings)
        self._environments = await asyncio.to_thread(
            Environments, settings.state_dir / "environments", settings.runtime
        )
        self._events = Events()
        self._watchers: set[asyncio.Task[None]] = set()  # of stories whose callers did not wait
        self._meters = Meters(torchserve.meters_of(settings))
        self._total = Sum(self._meters.torchserve.shown)
        self._board = Board(self._total)
        hosts, port = await self._in_serve(_inference_addresses)
        self._keys = await self._make_keys(hosts)
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
        await asyncio.to_thread(last_words.dead, settings.last_words)  # of a life before this one: nobody asks for them
        running = await self._in_serve(self._reconciler.sources, ("RUNNING",))
        self._board.expect(running - {serve.get_replica_context().replica_id.unique_id})
        self._publish()  # before anybody can ask: who may ask for what stands in the table
        self._listeners = self._make_listeners(port, context)
        for listener in self._listeners:
            await listener.open()
        self._machine = system.collect(self._meters.torchserve, settings)
        self._tasks = [asyncio.create_task(self._boot()), asyncio.create_task(self._run())]

    async def _make_keys(self, inference_hosts: list[str]) -> Keys | None:
        """The keys that requests must show; None where they need none. What an operator must know of it is said."""
        if not self._settings.wants_keys(*inference_hosts):
            if self._settings.is_open(*inference_hosts):
                log.warning("auth.mode is off, and others than this machine can reach this server: it answers them all")
            return None
        run = ray.get_runtime_context().get_session_name()
        keys = await asyncio.to_thread(Keys, self._settings, run)
        if self._settings.auth.torchserve_tokens:
            log.warning("%s", _WHERE_THE_KEYS_ARE % self._settings.key_file)
        return keys

    def _make_listeners(self, inference_port: int, context: ssl.SSLContext | None) -> list[Listener]:
        """One for each port that is not shared: with the inference port, or by the two of them."""
        m, shared = self._settings.management, self._settings.inference
        no_port = (0, inference_port)
        control = ControlPlane(self, self._settings, lambda: self._board.table.access)
        together = (m.host, m.port) == (m.metrics_host, m.metrics_port)
        render = self.render if m.enable_metrics_api and (together or m.also_metrics) else None
        listeners = []
        if not (shared.also_management and m.port in no_port):
            access = access_log.access(self._settings)
            api = management_app(control, self._settings, access, render=render, meters=self._meters)
            listeners.append(Listener(api, m.host, m.port, "management.port", context))
        alone = m.enable_metrics_api and not together
        if alone and not ((shared.also_metrics or m.also_metrics) and m.metrics_port in no_port):
            metrics = metrics_app(self.render, self._settings, lambda: self._board.table.access, self._meters)
            listeners.append(Listener(metrics, m.metrics_host, m.metrics_port, "management.metrics_port", context))
        return listeners

    # What readers ask

    async def poll(self, source: str, generation: int, samples: Report | None) -> Table | Nudge | None:
        """A reader's long poll; see control/board.py."""
        return await self._board.poll(source, generation, samples)

    async def leave(self, source: str, samples: Report) -> None:
        self._board.leave(source, samples)

    async def start_failed(self, ref: ModelRef, digest: str, error: StartFailed) -> None:
        """A replica could not load its model, whose archive has ``digest``; here is the author's traceback."""
        with contextlib.suppress(NotFound):  # removed meanwhile
            spec = change.find(self._registry, ref.name, ref.version)
            if spec.digest == digest:
                self._vitals.failed(spec, error)
                self._kick.set()

    async def died(self, deaths: list[Death]) -> None:
        """Replicas have died on another node."""
        self._bury(change.desired(self._registry), deaths)
        self._kick.set()

    async def stage(self, ref: ModelRef, stage: Stage) -> None:
        """How far a replica has come that starts."""
        if (story := self._events.of(ref.name, ref.version)) is not None:
            self._events.put(story, stage)

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
        story = self._story(registration)
        with self._events.told(story):
            return await self._register(registration, story)

    async def _register(self, registration: Registration, story: Story) -> Progress:
        async with self._admitted(registration, story) as spec:
            if not matches(spec.name, registration.within):
                raise WrongModel(spec.name)
            change.register(self._registry, spec)  # refused before anything is installed for it
            await self._install(spec, story)
            while spec.ref.app in self._leaving:  # what runs under its name is still the one that was removed
                await self._next_pass()
            async with self._writing:
                with contextlib.suppress(NotYet):  # a reader that has not heard of it only says so a little longer
                    await self._commit(change.register(self._registry, spec))
        if spec.min_workers == 0:
            self._events.put(story, "ready", workers=0)
            return Progress(spec.ref, 0, "done")
        if not registration.wait:
            self._watch(story, spec)
            return Progress(spec.ref, 0, "processing")
        try:
            return await self._started(story, spec)
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
        story = self._events.begin(ref.name, version=ref.version, workers=low)
        if not wait:
            self._watch(story, spec)
            return Progress(ref, self._running(ref), "processing")
        with self._events.told(story):
            return await self._started(story, spec)

    async def events(
        self, model: str, registration: str | None, since: int | None, patience: float
    ) -> list[Event]:
        if registration is None and not self._events.knows(model):
            spec = change.find(self._registry, model, None)
            story = self._events.begin(model, version=spec.version, workers=spec.min_workers)
            self._watch(story, spec)
        return await self._events.after(model, registration, since, patience)

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
            if (story := self._events.of(ref.name, ref.version)) is not None:
                self._events.put(story, "failed", reason="removed", message=f"{ref.name} {ref.version} was removed.")
        return ref

    async def describe(self, model: str, version: str | None) -> Description:
        spec = change.find(self._registry, model, version)
        await self._board.collect(1.0, self._alive)
        pending = int(self._total.total("torchrelay_queue_depth", model=spec.name, version=spec.version))
        default = self._registry.models[model].default == spec.version
        return Description(spec, self._status(spec.ref), default, pending)

    def _status(self, ref: ModelRef) -> ModelStatus:
        """What is known of a version. A replica whose process is gone is not ready, whatever was seen last."""
        status = self._vitals.statuses.get(ref, ModelStatus())
        workers = tuple(replace(w, ready=False) if w.ready and is_dead(w) else w for w in status.workers)
        if workers == status.workers:
            return status
        self._kick.set()
        running = sum(worker.ready for worker in workers)
        phase = status.phase if running or status.phase != "ready" else "loading"
        return replace(status, phase=phase, replicas=running, workers=workers)

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

    async def renew_key(self, kind: Literal["inference", "management"]) -> None:
        assert self._keys is not None  # the doors have no such route without keys
        async with self._writing:
            await asyncio.to_thread(self._keys.renew, kind)
            self._publish()
            await self._until_in_force()

    async def answer(self, question: str, args: tuple[Any, ...]) -> Any:
        """What a gateway's control plane asks (see keeper.py): an error is a value, or Ray would log it as a fault."""
        if question not in QUESTIONS:
            raise AttributeError(question)
        try:
            return await getattr(self, question)(*args)
        except RelayError as error:
            return error

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
        await self._until_in_force()

    async def _until_in_force(self) -> None:
        """Wait until every live reader has the table that hangs. Raises NotYet."""
        late = await self._board.in_force(self._settings.control.acknowledge_timeout, self._alive)
        if late:
            raise NotYet(f"Stored, and not yet in force at {len(late)} of the replicas that run.")

    def _removed(self, spec: ModelSpec) -> None:
        """Forget what was known of a version; its archive goes when its replicas are gone."""
        self._vitals.forget(spec.ref)
        self._leaving[spec.ref.app] = spec.digest

    @contextlib.asynccontextmanager
    async def _admitted(
        self, registration: Registration, story: Story, at_startup: bool = False
    ) -> AsyncIterator[ModelSpec]:
        """A new version's spec; until the end of the block its archive stays where it is."""
        async with self._tidying:
            self._admitting += 1
        try:
            spec = await asyncio.to_thread(self._admission.admit, registration, at_startup, self._events.teller(story))
            self._events.named(story, spec.name, spec.version)
            yield spec
        finally:
            self._admitting -= 1

    async def _install(self, spec: ModelSpec, story: Story) -> None:
        """What the archive requires, on this node, before anything is changed. Raises InstallFailed."""
        if spec.requirements:
            tell = self._events.teller(story)
            directory = await asyncio.to_thread(self._admission.directory, spec)
            await asyncio.to_thread(
                self._environments.build,
                spec.name,
                directory,
                spec.requirements,
                spec.digest,
                lambda line: tell("installing", line=line[:_LINE]),
            )

    # Stories

    def _story(self, registration: Registration) -> Story:
        archive = registration.url.partition("?")[0].rstrip("/").rpartition("/")[2]
        name = registration.model_name or stem(archive)
        return self._events.begin(name[:_LINE], registration.id, url=registration.url[:_LINE])

    def _watch(self, story: Story, spec: ModelSpec) -> None:
        """See a story to its end for a caller that does not wait."""

        async def watch() -> None:
            with contextlib.suppress(RelayError), self._events.told(story):
                await self._started(story, spec)

        task = asyncio.create_task(watch())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _started(self, story: Story, spec: ModelSpec) -> Progress:
        """Wait until a version has the workers that ``spec`` says; its story goes on meanwhile. Raises StartFailed."""
        self._events.put(story, "starting", workers=spec.min_workers)
        progress = await self._until_running(
            spec.ref,
            spec.min_workers,
            spec.startup_timeout + (self._settings.runtime.install_timeout if spec.requirements else 0),
            partial(self._tell_of_placement, story, spec),
        )
        self._events.put(story, "ready", workers=progress.replicas)
        return progress

    async def _tell_of_placement(self, story: Story, spec: ModelSpec) -> None:
        """What a version waits for that has no place yet."""
        seen = self._seen.get(spec.ref.app)
        if seen is None or sum(worker.pid > 0 for worker in seen.workers) >= spec.min_workers:
            return
        if time.time() - story.events[-1].time < _PATIENCE:  # what it has just been given counts as not free
            return
        free = await self._in_serve(self._reconciler.free)
        wanted = {"CPU": spec.num_cpus, "GPU": spec.num_gpus}
        short = [kind for kind, amount in wanted.items() if amount > free.get(kind, 0.0)]
        lacking = {kind: {"wanted": wanted[kind], "free": free.get(kind, 0.0)} for kind in short}
        if lacking:
            self._events.put(story, "starting", workers=spec.min_workers, waiting_for=lacking)

    def _publish(self) -> None:
        healthy = {spec.ref: self._vitals.healthy(spec) for spec in self._registry}
        now = self._board.table
        table = change.table(self._registry, self._vitals.statuses, healthy, now.generation, self._settled)
        table = replace(table, access=self._keys.access if self._keys is not None else None)
        if table != now or now.generation == 0:
            self._board.hang(replace(table, generation=self._board.next_generation()))

    async def _until_running(
        self, ref: ModelRef, count: int, startup_timeout: float, meanwhile: Callable[[], Awaitable[None]]
    ) -> Progress:
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
            await meanwhile()
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
        self._bury(desired, await asyncio.to_thread(last_words.dead, self._settings.last_words))
        self._note(desired, seen)
        tried = {app: want for app, want in desired.items() if self._vitals.tried(want.spec.ref)}
        steps = await self._in_serve(self._reconciler.act, tried, seen)
        await self._discard(seen)
        self._publish()
        passed, self._passed = self._passed, asyncio.Event()
        passed.set()
        moving = any(app not in seen or seen[app].running != want.low for app, want in tried.items())
        return bool(steps) or moving or any(app not in desired for app in seen)

    def _bury(self, desired: Mapping[str, Desired], deaths: Iterable[Death]) -> None:
        """Keep why replicas died, of versions that should run."""
        for death in deaths:
            want = desired.get(death.app)
            if want is not None and want.spec.digest == death.digest:
                log.error("%s: replica %s died. %s", death.app, death.replica, death.why)
                self._vitals.died(want.spec, death)

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
                story = self._story(archive)
                try:
                    with self._events.told(story):
                        spec = await self._put(archive, story)
                    if spec is not None:
                        self._watch(story, spec)
                except RelayError as error:
                    log.error("%s was not loaded: %s\n%s", archive.url, error, getattr(error, "detail", ""))
        except Exception:
            log.exception("the model store could not be read")
        finally:
            self._booted = True
            self._kick.set()

    async def _put(self, archive: Registration, story: Story) -> ModelSpec | None:
        """Register an archive of the model store where it is new or has changed; the spec that holds, if one does."""
        async with self._admitted(archive, story, at_startup=True) as spec:
            own = self._settings.control.models.get(spec.name, {}).get(spec.version)
            first = own is not None and own.default_version
            if change.put(self._registry, spec, first) is not self._registry:
                await self._install(spec, story)
            async with self._writing:
                after = change.put(self._registry, spec, first)
                if after is not self._registry:
                    with contextlib.suppress(NotYet):
                        await self._commit(after)
        holds = next((known for known in self._registry if known.ref == spec.ref), None)
        if holds is None:
            self._events.forget(story)
        return holds

    def _application(self, step: Deploy) -> Any:
        want = step.desired
        return options.model_app(want.spec, self._settings, want.low, {ATTEMPT: step.attempt})

    def _config_of(self, want: Desired) -> Mapping[str, Any]:
        return options.user_config(want.spec, self._settings)

    async def _in_serve(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._serve, function, *args)

    async def _alive(self) -> set[str]:
        return await self._in_serve(self._reconciler.sources)

    async def render(self, names: frozenset[str] | None = None) -> bytes:
        """The metrics page; with ``names``, only the samples that are called so."""
        await self._board.collect(1.0, self._alive)
        self._total.put("management", self._meters.report())
        return self._total.render(names)

    async def check_health(self) -> None:
        for task in self._tasks:
            if task.done() and task.exception() is not None:
                raise RuntimeError("the reconciler ended") from task.exception()

    async def __del__(self) -> None:
        for task in (*self._tasks, *self._watchers):
            task.cancel()
        for listener in self._listeners:
            await listener.close()
