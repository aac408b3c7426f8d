"""What the control plane asks: versions registered, scaled, described and removed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import orjson

from serve_app.control import registry as change
from serve_app.control.admission import Admission
from serve_app.control.board import Board
from serve_app.control.events import Events, Story
from serve_app.control.keys import Keys
from serve_app.deployments.ledger import Ledger
from serve_app.deployments.remote import Remotes
from serve_app.deployments.rounds import Rounds
from serve_app.errors import HandlerFailed, InUse, NotYet, NoWorker, RelayError, StartFailed, WrongModel
from serve_app.runtime.environments import Environments
from serve_app.settings import Settings
from serve_app.store.manifest import HUGGING_FACE, stem
from serve_app.telemetry.metrics import Sum
from serve_app.types import (
    Call,
    Description,
    Event,
    ModelRef,
    ModelSpec,
    Progress,
    Registration,
    ReplyStream,
    matches,
)

log = logging.getLogger("torchrelay.registrar")

_PATIENCE = 2.0  # seconds without a place after which a story says what is missing
_LINE = 300  # characters of an installer's line that are told


class Registrar:
    """``controlplane.Keeper``, in the process that keeps the registry."""

    def __init__(
        self,
        ledger: Ledger,
        rounds: Rounds,
        board: Board,
        total: Sum,
        admission: Admission,
        environments: Environments,
        events: Events,
        remotes: Remotes,
        keys: Keys | None,
        settings: Settings,
    ) -> None:
        self._ledger = ledger
        self._rounds = rounds
        self._board = board
        self._total = total
        self._admission = admission
        self._environments = environments
        self._events = events
        self._remotes = remotes
        self._keys = keys
        self._settings = settings
        self._watchers: set[asyncio.Task[None]] = set()  # of stories whose callers did not wait

    def close(self) -> None:
        for task in self._watchers:
            task.cancel()

    # Changes

    async def register(self, registration: Registration) -> Progress:
        story = self.story(registration)
        with self._events.told(story):
            return await self._register(registration, story)

    async def _register(self, registration: Registration, story: Story) -> Progress:
        ledger = self._ledger
        async with self.admitted(registration, story) as spec:
            if not matches(spec.name, registration.within):
                raise WrongModel(spec.name)
            change.register(ledger.registry, spec)  # refused before anything is installed for it
            await self.install(spec, story)
            while self._rounds.leaving(spec.ref):
                await self._rounds.next()
            async with ledger.writing:
                with contextlib.suppress(NotYet):  # a reader that has not heard of it only says so a little longer
                    await ledger.commit(change.register(ledger.registry, spec))
        advice = "" if registration.handler else _advice(spec)
        if spec.min_workers == 0:
            self._events.put(story, "ready", workers=0)
            return Progress(spec.ref, 0, "done", _between(spec), advice=advice)
        if not registration.wait:
            self._watch(story, spec)
            return Progress(spec.ref, 0, "processing", _between(spec), advice=advice)
        try:
            return replace(await self.started(story, spec), advice=advice)
        except StartFailed:
            async with ledger.writing:
                with contextlib.suppress(InUse):  # traffic was dealt out to it meanwhile: it stays, and is tried again
                    after = change.unregister(ledger.registry, spec.name, spec.version)[0]
                    with contextlib.suppress(NotYet):
                        await ledger.commit(after)
                    self._rounds.removed(spec)
            raise

    async def scale(
        self,
        model: str,
        version: str | None,
        low: int | None,
        high: int | None,
        wait: bool,
        scaling: Mapping[str, Any] | None = None,
    ) -> Progress:
        async with self._ledger.writing:
            before = change.find(self._ledger.registry, model, version)
            after, ref = change.scale(self._ledger.registry, model, version, low, high, scaling)
            self._rounds.forgive(ref)
            await self._ledger.commit(after)
        spec = change.find(after, ref.name, ref.version)
        story = self._events.begin(ref.name, version=ref.version, workers=spec.min_workers)
        ended = (before.min_workers, before.max_workers) if before.scaling and not spec.scaling else None
        if not wait:
            self._watch(story, spec)
            return Progress(ref, self._rounds.running(ref), "processing", _between(spec), ended)
        with self._events.told(story):
            return replace(await self.started(story, spec), was_between=ended)

    async def set_default(self, model: str, version: str) -> ModelRef:
        async with self._ledger.writing:
            after, ref = change.set_default(self._ledger.registry, model, version)
            await self._ledger.commit(after)
        return ref

    async def unregister(self, model: str, version: str | None) -> ModelRef:
        async with self._ledger.writing:
            spec = change.find(self._ledger.registry, model, version)
            after, ref = change.unregister(self._ledger.registry, model, version)
            await self._ledger.commit(after)
            self._rounds.removed(spec)
            if (story := self._events.of(ref.name, ref.version)) is not None:
                self._events.put(story, "failed", reason="removed", message=f"{ref.name} {ref.version} was removed.")
        return ref

    async def renew_key(self, kind: Literal["inference", "management"]) -> None:
        assert self._keys is not None  # the doors have no such route without keys
        async with self._ledger.writing:
            await asyncio.to_thread(self._keys.renew, kind)
            self._ledger.publish()
            await self._ledger.until_in_force()

    async def boot(self, then: Callable[[], Awaitable[None]]) -> None:
        """Register what the model store holds: what is new there, and what has changed; ``then`` the start is over."""
        try:
            for archive in await asyncio.to_thread(self._admission.at_startup):
                story = self.story(archive)
                try:
                    with self._events.told(story):
                        spec = await self._put(archive, story)
                    if spec is not None:
                        self._watch(story, spec)
                except RelayError as error:
                    log.error("%s was not loaded: %s\n%s", archive.url, error, getattr(error, "detail", ""))
        except Exception:
            log.exception("the model store could not be read")
        try:
            await then()
        finally:
            self._rounds.booted = True
            self._rounds.soon()

    async def _put(self, archive: Registration, story: Story) -> ModelSpec | None:
        """Register an archive of the model store where it is new or has changed; the spec that holds, if one does."""
        ledger = self._ledger
        async with self.admitted(archive, story, at_startup=True) as spec:
            own = self._settings.control.models.get(spec.name, {}).get(spec.version)
            first = own is not None and own.default_version
            if change.put(ledger.registry, spec, first) is not ledger.registry:
                await self.install(spec, story)
            async with ledger.writing:
                after = change.put(ledger.registry, spec, first)
                if after is not ledger.registry:
                    with contextlib.suppress(NotYet):
                        await ledger.commit(after)
        holds = next((known for known in ledger.registry if known.ref == spec.ref), None)
        if holds is None:
            self._events.forget(story)
        return holds

    # Questions

    async def describe(self, model: str, version: str | None) -> Description:
        spec = change.find(self._ledger.registry, model, version)
        await self._board.collect(1.0, self._rounds.alive)
        pending = int(self._total.total("torchrelay_queue_depth", model=spec.name, version=spec.version))
        default = self._ledger.registry.models[model].default == spec.version
        return Description(spec, self._rounds.status(spec.ref), default, pending)

    async def metadata(self, model: str, version: str | None) -> dict[str, Any]:
        """What the handler says of itself: one replica's answer to a ``describe`` call, empty where it is no object."""
        ref = change.find(self._ledger.registry, model, version).ref
        if not self._rounds.running(ref):
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
        change.find(self._ledger.registry, model, None)
        return sorted(self._ledger.registry.models[model].versions)

    async def models(self) -> list[tuple[str, str]]:
        models = self._ledger.registry.models.items()
        records = sorted((name, record) for name, record in models if not change.is_workflow(record))
        return [(name, record.versions[record.default].url) for name, record in records]

    async def events(self, model: str, registration: str | None, since: int | None, patience: float) -> list[Event]:
        if registration is None and not self._events.knows(model):
            spec = change.find(self._ledger.registry, model, None)
            story = self._events.begin(model, version=spec.version, workers=spec.min_workers)
            self._watch(story, spec)
        return await self._events.after(model, registration, since, patience)

    # On the way to a spec

    @contextlib.asynccontextmanager
    async def admitted(
        self, registration: Registration, story: Story, at_startup: bool = False
    ) -> AsyncIterator[ModelSpec]:
        """A new version's spec; until the end of the block its archive stays where it is."""
        async with self._rounds.archives_kept():
            spec = await asyncio.to_thread(self._admission.admit, registration, at_startup, self._events.teller(story))
            self._events.named(story, spec.name, spec.version)
            yield spec

    async def install(self, spec: ModelSpec, story: Story) -> None:
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

    def story(self, registration: Registration) -> Story:
        """The story of a registration, which begins."""
        archive = registration.url.partition("?")[0].rstrip("/").rpartition("/")[2]
        name = registration.model_name or stem(archive)
        return self._events.begin(name[:_LINE], registration.id, url=registration.url[:_LINE])

    def _watch(self, story: Story, spec: ModelSpec) -> None:
        """See a story to its end for a caller that does not wait."""

        async def watch() -> None:
            with contextlib.suppress(RelayError), self._events.told(story):
                await self.started(story, spec)

        task = asyncio.create_task(watch())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def started(self, story: Story, spec: ModelSpec) -> Progress:
        """Wait until a version has the workers that ``spec`` says; its story goes on meanwhile. Raises StartFailed."""
        self._events.put(story, "starting", workers=spec.min_workers)
        progress = await self._rounds.until_running(
            spec,
            spec.startup_timeout + (self._settings.runtime.install_timeout if spec.requirements else 0),
            partial(self._tell_of_placement, story, spec),
        )
        self._events.put(story, "ready", workers=progress.replicas)
        return replace(progress, between=_between(spec))

    async def _tell_of_placement(self, story: Story, spec: ModelSpec) -> None:
        """What a version waits for that has no place yet."""
        if time.time() - story.events[-1].time < _PATIENCE:  # what it has just been given counts as not free
            return
        if lacking := await self._rounds.lacking(spec):
            self._events.put(story, "starting", workers=spec.min_workers, waiting_for=lacking)


def _advice(spec: ModelSpec) -> str:
    """What to do where a folder's usual handler is not what most callers of such a model are after."""
    if spec.handler == HUGGING_FACE and spec.config.get("task") == "text-generation":
        return "It answers as transformers' pipeline; registered with handler=llm it streams, and speaks OpenAI's API"
    return ""


def _between(spec: ModelSpec) -> tuple[int, int] | None:
    """The workers between which autoscaling holds."""
    return (spec.min_workers, spec.max_workers) if spec.scaling is not None else None
