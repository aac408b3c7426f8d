"""One version of one model: the replica that holds it, and answers for it directly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve

from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane, TableReader
from serve_app.deployments import error_page
from serve_app.deployments.archive import Archive
from serve_app.deployments.homes import Here, Homes, sequence_keys
from serve_app.deployments.hop import HopServer, socket_path
from serve_app.deployments.keeper import RemoteKeeper
from serve_app.deployments.link import Link
from serve_app.deployments.options import grace
from serve_app.deployments.ray_batcher import RayBatcher
from serve_app.deployments.remote import Remotes
from serve_app.deployments.sharded import Group
from serve_app.doors import middleware
from serve_app.doors.app import inference_app
from serve_app.errors import RelayError, StartFailed, WorkerDied
from serve_app.runtime.author import Author
from serve_app.runtime.batcher import Batcher
from serve_app.runtime.concurrent import ConcurrentBatcher
from serve_app.runtime.continuous import ContinuousBatcher
from serve_app.runtime.quota import Quota
from serve_app.runtime.runner import Runner
from serve_app.runtime.sequences import Sequences
from serve_app.settings import Settings
from serve_app.shadow.mirror import Mirror
from serve_app.telemetry import access_log, last_words, logs, system, torchserve
from serve_app.telemetry.last_words import LastWords
from serve_app.telemetry.load import Load
from serve_app.telemetry.logs import Speaker
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, Chunk, ModelSpec, Reply, ReplyStream, Stage, Table

log = logging.getLogger("torchrelay.model")

_FAREWELL = 0.3  # seconds that the last answers of a replica get to leave before its process ends
_LEAVING = 4.0  # seconds of a replica's grace that its other steps need
_EXIT_HUNG = 70


AnyBatcher = Batcher | RayBatcher | ConcurrentBatcher | ContinuousBatcher


class LocalTarget:
    """The model in this process, as the data plane calls it."""

    def __init__(self, quota: Quota) -> None:
        self.infer = quota.submit


@serve.deployment
@serve.ingress()
class ModelReplica:
    """Opens its archive, loads and warms its model, and runs the same doors as the gateway over it."""

    async def __init__(self, spec: ModelSpec, settings: Settings) -> None:
        replica = serve.get_replica_context().replica_id.unique_id
        logs.configure(settings, Speaker.of_replica(spec.name, spec.version, replica), spec.config.get("log_level"))
        self._spec = spec
        self._settings = settings
        self._hung = False
        self._group: Group | None = None  # of a sharded version
        self._replica = replica
        self._keys = sequence_keys(settings)
        self._sequences: Sequences | None = None  # of a stateful version
        self._meters = Meters(torchserve.meters_of(settings))
        self._autoscaled = Load()
        self._meters.on_batch = self._autoscaled.batch
        self._words = LastWords(settings.last_words, spec.ref.app, spec.digest, replica)
        try:
            await self._start(replica)
        except BaseException:
            self._words.close()  # whoever started it is told by the exception
            raise
        self._words.ready()

    async def _start(self, replica: str) -> None:
        spec, settings = self._spec, self._settings
        reader = TableReader(on_table=self._allot)
        self._link = Link(reader, self._meters)
        await asyncio.to_thread(error_page.put_up, ray.get_runtime_context().get_node_id())
        await self._tell_of_the_dead(replica)
        await self._pause_after_crashes()
        began = time.monotonic()
        try:
            await self._load(replica)
        except StartFailed as error:
            log.error("%s\n%s", error, error.detail)
            # Serve keeps only the end of a long message; Management wants the author's traceback whole.
            await self._link.management.start_failed.remote(spec.ref, spec.digest, error)
            raise
        logs.mend()
        worker = f"W-{replica}-{spec.name}_{spec.version}"
        load_time = self._meters.torchserve.child("WorkerLoadTime", worker, "Host")
        load_time.record(round((time.monotonic() - began) * 1000))
        self._quota = Quota(self._batcher, spec.ref)
        local = (spec.ref, LocalTarget(self._quota))
        remotes = Remotes(reader, settings)
        self._mirror = Mirror(lambda: reader.table, remotes, self._meters)
        self._plane = DataPlane(
            reader,
            self._meters,
            remotes,
            local,
            wake=remotes.wake,
            mirror=self._mirror,
            homes=Homes(reader, remotes, self._keys, self._here()),
            most_items=settings.inference.max_workflow_items,
        )
        self._link.observed["trials"] = self._plane.observations.take
        self._link.observed["shadow"] = self._mirror.take
        self._access = access_log.access(settings)
        self._hops = HopServer(self._quota.enqueue, self._has)
        await self._hops.open(socket_path(replica))
        self._link.refresh = lambda: self._meters.depth(spec.name, spec.version, self._batcher.pending)
        self._machine = system.collect(self._meters.torchserve, settings)
        self._link.start()
        await self._link.first_table(timeout=30)

    def _allot(self, table: Table) -> None:
        """Take this replica's share of the calls that its version answers at once."""
        model = table.models.get(self._spec.name)
        row = model.versions.get(self._spec.version) if model is not None else None
        if row is not None:
            self._quota.allot(row.max_concurrent_requests, row.replicas)
            if self._sequences is not None:
                self._sequences.allot(row.replicas)

    def _here(self) -> Here | None:
        """This replica, as one where sequences are; None where its version has none."""
        if self._sequences is None:
            return None
        return Here(self._spec.ref, self._replica, self._sequences, LocalTarget(self._quota))

    def _has(self, sequence: str) -> bool:
        return self._sequences is not None and self._sequences.holds(sequence)

    async def _tell_of_the_dead(self, replica: str) -> None:
        """Management sees why replicas of its own node died; of those on other nodes the next one there tells it."""
        if deaths := await asyncio.to_thread(last_words.dead, self._settings.last_words, replica):
            self._link.management.died.remote(deaths)

    async def _pause_after_crashes(self) -> None:
        """A crash loop is slowed down here, where waiting costs nobody anything."""
        try:
            pause = await asyncio.wait_for(self._link.management.pause_before_start.remote(self._spec.ref), 10)
        except Exception as error:  # Management is being replaced: starting the model matters more
            log.info("Management did not say how long to pause: %s", type(error).__name__)
            return
        if pause:
            log.warning("%s: its last replicas crashed; starting in %s s", self._spec.ref.app, pause)
            await asyncio.sleep(pause)

    async def _load(self, replica: str) -> None:
        spec, settings = self._spec, self._settings
        author = Author()
        loop = asyncio.get_running_loop()
        management = self._link.management
        archive = Archive(spec, settings, management)
        if spec.ranks > 1:
            self._group = Group(spec, settings, management, replica, author)

        def load(directory: Path) -> Runner:
            runner = archive.runner(directory, self._meters.torchserve.cache(spec.name))
            runner.load()
            loop.call_soon_threadsafe(self._tell, "warming")
            runner.warm_up()
            return runner

        async def open_and_load() -> Runner:
            directory = await archive.open()
            if spec.requirements:
                self._tell("installing")
                await asyncio.to_thread(archive.install, directory)
            self._tell("loading")
            if self._group is not None:
                return await self._group.load(partial(load, directory))
            return await loop.run_in_executor(author, load, directory)

        limit = spec.startup_timeout + (settings.runtime.install_timeout if spec.requirements else 0)
        try:
            runner = await asyncio.wait_for(open_and_load(), limit if spec.startup_timeout else None)
        except asyncio.TimeoutError:
            cure = "raise it at the registration, or startupTimeout in model-config.yaml"
            why = f"not ready within startup_timeout ({spec.startup_timeout} s); {cure}. It stood at\n{author.where}"
            raise StartFailed(spec.name, spec.version, why) from None
        except RelayError as error:
            if isinstance(error, StartFailed):
                raise
            why = "\n".join(filter(None, (str(error), getattr(error, "detail", ""))))
            raise StartFailed(spec.name, spec.version, why) from None
        self._runner = runner
        self._batcher = self._batcher_of(runner, author)
        if spec.signature is None:
            self._link.greet = lambda: management.offers.remote(spec.ref, spec.digest, runner.signature)
        if self._group is not None:
            self._mourning = loop.create_task(self._end_with(self._group))

    def _batcher_of(self, runner: Runner, author: Author) -> AnyBatcher | Sequences:
        """What takes this version's calls in; ``author`` is the handler's thread."""
        batcher = self._rows_of(runner, author)
        spec = self._spec
        if not spec.sequence_batching:
            return batcher
        self._sequences = Sequences(
            batcher,
            spec.ref,
            self._meters,
            self._replica,
            keys=self._keys,
            most=spec.max_num_sequence,
            least=spec.batch_size,
            queue_size=spec.max_sequence_job_queue_size,
            max_idle=spec.sequence_max_idle / 1000,
            timeout=spec.sequence_timeout / 1000,
            overlap=spec.continuous_batching,
            grace=(grace(spec) - _LEAVING) / 2,
            on_end=self._told_of_ends(runner, author),
        )
        return self._sequences

    def _told_of_ends(self, runner: Runner, author: Author) -> Callable[[str, str], None]:
        """What brings the end of a sequence to the handler, in its own thread."""
        if not runner.hears_of_ends:
            return lambda name, why: None
        if runner.loop is not None:
            return partial(runner.loop.call_soon_threadsafe, runner.sequence_ended)
        return partial(author.post, runner.sequence_ended if self._group is None else self._group.sequence_ended)

    def _rows_of(self, runner: Runner, author: Author) -> AnyBatcher:
        spec = self._spec
        limits: dict[str, Any] = {
            "author": author,
            "queue_size": spec.job_queue_size,
            "response_timeout": spec.response_timeout,
            "on_hung": self._end_hung,
        }
        if runner.loop is not None:
            return ConcurrentBatcher(runner.run_async, runner.loop, spec.ref, self._meters, **limits)
        if spec.continuous_batching:
            # Twice as many where there are sequences: what is said to a stream that runs needs a place beside it.
            size = spec.batch_size * (2 if spec.sequence_batching else 1)
            run = runner.run if self._group is None else self._group.run
            delay = spec.max_batch_delay
            return ContinuousBatcher(
                run, spec.ref, self._meters, max_batch_size=size, max_batch_delay=delay, **limits
            )
        batcher = Batcher(
            runner.run if self._group is None else self._group.run,
            spec.ref,
            self._meters,
            prepare=runner.prepare,
            max_batch_size=spec.batch_size,
            max_batch_delay=spec.max_batch_delay,
            retries=spec.retries,
            tickets=spec.use_job_ticket,
            bucket_by_length=spec.bucket_by_length,
            **limits,
        )
        if spec.batcher == "ray":
            return RayBatcher(batcher, spec.ref, spec.batch_size, spec.max_batch_delay, spec.job_queue_size)
        return batcher

    def _tell(self, stage: Stage) -> None:
        """Tell Management how far this start has come; nothing depends on it."""
        self._link.management.stage.remote(self._spec.ref, stage)

    def __serve_build_asgi_app__(self) -> Any:
        # Predictions are put aside here too; and the route of fast_path oip is asked for statistics.
        keeper = RemoteKeeper(self._link.management)
        control = ControlPlane(keeper, self._settings, lambda: self._plane.access)
        doors = inference_app(self._plane, self._settings, self._meters, self._access, control)
        middleware.answer_with(doors, self._settings.inference.max_request_size)
        return doors

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Take over what needs no restart."""
        self._autoscaled.period = config.get("look_back_period_s", self._autoscaled.period)
        tunables = config["torchrelay"]
        places = 2 if self._spec.continuous_batching and self._spec.sequence_batching else 1  # as in _rows_of
        self._batcher.configure(
            max_batch_size=tunables["batch_size"] * places,
            max_batch_delay=tunables["max_batch_delay"],
            queue_size=tunables["job_queue_size"],
            response_timeout=tunables["response_timeout"],
            retries=tunables["retries"],
        )

    async def awake(self) -> None:
        """Somebody waits for a replica: this is one."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray Serve's autoscaler is told of this replica; see scaling.py."""
        return self._autoscaled.stats(self._batcher.ongoing)

    async def infer(self, sent: bytes) -> bytes:
        """The hop: pickled calls from another process; for each a Reply, a RelayError, or the chunks of its stream."""
        answers = await self._quota.submit_all(pickle.loads(sent))
        streams = [(i, answer) for i, answer in enumerate(answers) if isinstance(answer, ReplyStream)]
        try:
            for i, stream in streams:
                try:
                    answers[i] = [chunk async for chunk in _chunks(stream)]
                except RelayError as error:
                    answers[i] = error
        finally:
            for _, stream in streams:
                await stream.aclose()
        return pickle.dumps(answers, pickle.HIGHEST_PROTOCOL)

    async def stream(self, call: Call) -> AsyncIterator[Chunk | RelayError]:
        """One row alone; the first chunk has the head, and is the last one where the handler does not stream.

        An error is an item: raised, Ray would log its traceback as a fault of ours.
        """
        try:
            reply = await self._quota.submit(call)
        except RelayError as error:
            yield error
            return
        if isinstance(reply, Reply):
            yield Chunk(b"", last=True, head=reply)
            return
        try:
            async for chunk in _chunks(reply):
                yield chunk
        except RelayError as error:
            yield error
        finally:
            await reply.aclose()

    async def holds(self, sequence: str) -> bool:
        """Whether the state of a sequence is here."""
        return self._has(sequence)

    def _end_hung(self, why: str) -> None:
        """The handler does not come back: let the answers leave, then end; Serve starts another replica."""
        self._words.say(why)
        self._hung = True
        asyncio.get_running_loop().call_later(_FAREWELL, os._exit, _EXIT_HUNG)

    async def _end_with(self, group: Group) -> None:
        """A rank is lost, and its group with it: say so to everybody who waits, and end."""
        why = await group.lost()
        log.error("%s: %s", self._spec.ref.app, why)
        self._batcher.abandon(WorkerDied(why), "its replica lost a rank and is being replaced")
        self._end_hung(why)

    async def check_health(self) -> None:
        if self._hung:
            raise RuntimeError("the handler hangs")
        if self._group is not None:
            await self._group.check()
        else:
            await self._runner.check_health()

    async def _finish(self) -> None:
        """Answer what came over the short hop, of which Ray Serve does not know; what still comes goes elsewhere."""
        if not self._hung and (self._batcher.ongoing or (self._sequences is not None and self._sequences.open)):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._batcher.close(), grace(self._spec) - _LEAVING)
            await asyncio.sleep(_FAREWELL)

    async def __del__(self) -> None:
        self._words.close()
        await self._finish()
        self._hops.close()
        if self._group is not None:
            self._mourning.cancel()
            self._group.close()
        await self._mirror.close()
        await self._link.leave()


async def _chunks(stream: ReplyStream) -> AsyncIterator[Chunk]:
    head: Reply | None = stream.head
    async for body in stream:
        yield Chunk(body, head=head)
        head = None
