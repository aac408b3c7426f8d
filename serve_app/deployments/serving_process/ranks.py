"""Sharded replicas: the ranks beside the replica, and the one order in which all of them run batches."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_app.deployments.serving_process.node_archive import NodeArchive
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.errors import HandlerFailed, HandlerRejected, RelayError, ReplicaDied, StartFailed
from serve_app.net.private_files import restrict_umask
from serve_app.runtime.batching.async_batcher import run_until_stopped
from serve_app.runtime.batching.request_queue import Emit
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.runner import Runner
from serve_app.settings import Settings
from serve_app.telemetry import logs, torchserve
from serve_app.telemetry.logs import ProcessIdentity
from serve_app.telemetry.metrics import Meters

if TYPE_CHECKING:
    from handlers.distributed.process_group import RankPlacement

log = logging.getLogger(__name__)

_RANK_LAG_TIMEOUT_S = 10.0  # seconds after rank 0 in which the others must finish a batch
_HEALTH_TIMEOUT_S = 5.0  # seconds in which every rank responds to a health check


class ShardRank:
    """A rank from 1 on, with rank 0's archive, handler and batches. The results of its handler are dropped.

    An asynchronous handler gets requests at rank 0 only, and synchronizes its ranks itself, as an engine
    does.
    """

    def __init__(self, spec: ModelSpec, settings: Settings, management: Any, replica: str, rank: int) -> None:
        restrict_umask()
        identity = ProcessIdentity.of_replica(spec.name, spec.version, f"{replica}.rank{rank}")
        logs.configure(settings, identity, spec.config.get("log_level"))
        self._spec = spec
        self._archive = NodeArchive(spec, settings, management)
        # The handler's metrics, which nothing reads.
        self._metrics = Meters(torchserve.create_recorders(settings)).torchserve.cache(spec.name)
        self._handler_thread = HandlerThread()

    async def load(self, placement: RankPlacement, port: int) -> StartFailed | None:
        """Load this rank's shard together with all other ranks; return the error that prevented it."""
        spec = self._spec
        try:
            directory = await self._archive.open()
            if spec.requirements:
                await asyncio.to_thread(self._archive.install, directory)
            self._runner = self._archive.create_runner(directory, self._metrics)
            await asyncio.get_running_loop().run_in_executor(
                self._handler_thread, self._load, placement, port
            )
        except StartFailed as error:
            return error
        except Exception as error:
            reason = str(error) if isinstance(error, RelayError) else traceback.format_exc()
            return StartFailed(
                spec.name, spec.version, f"rank {placement.rank} of {placement.world}: {reason}"
            )
        logs.restore_loggers()
        return None

    def _load(self, placement: RankPlacement, port: int) -> None:
        _rendezvous(placement, port).join()
        self._runner.load()
        if self._runner.loop is None:
            self._runner.warm_up()
        else:  # only rank 0 gets requests; the handler's own loop keeps running in this thread
            self._handler_thread.post(run_until_stopped, self._runner.loop)

    async def run(self, payload: bytes) -> bool:
        """Run the handler on a batch of pickled requests; return whether it failed."""
        loop = asyncio.get_running_loop()
        return has_handler_failure(
            await loop.run_in_executor(
                self._handler_thread, self._runner.run, pickle.loads(payload), _discard_chunk
            )
        )

    async def check_health(self) -> int:
        """Return the resident bytes of this process while its handler is healthy."""
        await self._runner.check_health()
        return int(psutil.Process().memory_info().rss)

    async def sequence_ended(self, name: str, reason: str) -> None:
        self._handler_thread.post(self._runner.sequence_ended, name, reason)

    async def watch(self) -> None:
        """Wait for ever; the call fails when this process ends."""
        await asyncio.Event().wait()


class RankGroup:
    """The ranks of a replica, which is rank 0 itself, in bundle 0 of its placement group. Created on the
    event loop.

    A process group that lost a rank never recovers, so all ranks end together: ``lost`` returns when the
    replica has to end, and Ray ends the others with it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        settings: Settings,
        management: Any,
        replica: str,
        handler_thread: HandlerThread,
    ) -> None:
        self._spec = spec
        self._handler_thread = handler_thread
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._failure = ""  # the same, for the handler thread
        self.memory: dict[int, int] = {}  # resident bytes of the other ranks at their last health checks
        self._bundles = get_current_placement_group()
        self._ranks = [
            ray.remote(ShardRank)
            .options(
                num_cpus=spec.num_cpus,
                num_gpus=spec.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._bundles, number),
            )
            .remote(spec, settings, management, replica, number)
            for number in range(1, spec.ranks)
        ]
        self._watches = [self._loop.create_task(self._watch(number)) for number in range(1, spec.ranks)]

    async def load(self, load: Callable[[], Runner]) -> Runner:
        """Return the result of ``load`` in the handler thread, while the other ranks load too.

        Raises StartFailed.
        """
        spec = self._spec
        placements = await asyncio.to_thread(self._placements)
        rendezvous = await self._loop.run_in_executor(self._handler_thread, _rendezvous, placements[0])

        def together() -> Runner:
            rendezvous.join()
            return load()

        async def other(number: int) -> None:
            error = await self._ranks[number - 1].load.remote(placements[number], rendezvous.port)
            if error is not None:
                raise error

        own_load = self._loop.run_in_executor(self._handler_thread, together)
        loading = asyncio.gather(own_load, *(other(placement.rank) for placement in placements[1:]))
        waiting: list[asyncio.Future[Any]] = [loading, self._lost]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            raise StartFailed(spec.name, spec.version, self._lost.result())
        runner = (await loading)[0]
        assert runner is not None  # only other ranks return None
        self._runner: Runner = runner
        return runner

    def _placements(self) -> list[RankPlacement]:
        from handlers.distributed.process_group import RankPlacement

        world, gpu = self._spec.ranks, self._spec.num_gpus > 0
        nodes = placement_group_table(self._bundles)["bundles_to_node_id"]
        address = get_node_ip_address()
        placed = [nodes[number] for number in range(world)]
        return [
            RankPlacement(number, world, placed[:number].count(node), placed.count(node), address, gpu)
            for number, node in enumerate(placed)
        ]

    def run(
        self, requests: Sequence[InferenceRequest], emit: Emit, prepared: Sequence[Future[Any] | None] = ()
    ) -> list[InferenceResponse | RelayError]:
        """Run ``Runner.run`` on every rank; return rank 0's results, or ReplicaDied where another rank
        failed.
        """
        if self._failure:
            return [ReplicaDied(self._failure)] * len(requests)
        payload = pickle.dumps(requests, pickle.HIGHEST_PROTOCOL)
        others = [rank.run.remote(payload) for rank in self._ranks]
        # Without ``has_left``: a rank that returns early would leave the others in a collective operation.
        responses = self._runner.run(requests, lambda index, chunk: emit(index, chunk), prepared)
        if not self._wait_for_ranks(others, has_handler_failure(responses)):
            return [ReplicaDied(self._failure)] * len(requests)
        return responses

    def sequence_ended(self, name: str, reason: str) -> None:
        """Call ``Runner.sequence_ended`` on every rank, between two batches."""
        for rank in self._ranks:
            rank.sequence_ended.remote(name, reason)
        self._runner.sequence_ended(name, reason)

    def _wait_for_ranks(self, others: Sequence[Any], own_failure: bool) -> bool:
        """Wait for the other ranks; return whether they ended the batch as rank 0 did."""
        deadline = time.monotonic() + _RANK_LAG_TIMEOUT_S
        for number, other in enumerate(others, 1):
            try:
                if ray.get(other, timeout=max(0.0, deadline - time.monotonic())) is own_failure:
                    continue
                reason = "failed at a batch that rank 0 answered"
                if own_failure:
                    reason = "answered a batch where rank 0 failed"
            except RayActorError:
                reason = "ended"
            except GetTimeoutError:
                reason = f"was not done with a batch {_RANK_LAG_TIMEOUT_S:g} s after rank 0"
            except RayError as error:
                reason = f"could not run a batch: {error}"
            self._mark_lost(number, reason)
            return False
        return True

    async def _watch(self, number: int) -> None:
        try:
            await self._ranks[number - 1].watch.remote()
        except RayError as error:
            log.error("%s: rank %d: %s", self._spec.ref.app, number, error)
            self._mark_lost(number, "ended")

    def _mark_lost(self, number: int, reason: str) -> None:
        """Record, from any thread, that the group is broken."""
        cure = "the replica starts anew, with all its ranks"
        self._failure = self._failure or f"rank {number} of {self._spec.ranks} {reason}; {cure}"
        self._loop.call_soon_threadsafe(self._resolve_lost)

    def _resolve_lost(self) -> None:
        if not self._lost.done():
            self._lost.set_result(self._failure)

    async def lost(self) -> str:
        """Wait until a rank is lost; return which one, and how."""
        return await asyncio.shield(self._lost)

    async def check_health(self) -> None:
        """Raise where a rank does not respond in time; a rank whose handler is unhealthy is lost."""
        checks = [self._check_rank(0, self._runner.check_health())]
        checks += [self._check_rank(number, self._measure(number)) for number in range(1, self._spec.ranks)]
        await asyncio.wait_for(asyncio.gather(*checks), _HEALTH_TIMEOUT_S)

    async def _measure(self, number: int) -> None:
        self.memory[number] = await self._ranks[number - 1].check_health.remote()

    async def _check_rank(self, number: int, health: Awaitable[None]) -> None:
        try:
            await health
        except RayActorError:
            self._mark_lost(number, "ended")
        except Exception as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            self._mark_lost(number, f"is not well ({cause})")

    def close(self) -> None:
        """End the other ranks."""
        for watch in self._watches:
            watch.cancel()
        for rank in self._ranks:
            ray.kill(rank)


def has_handler_failure(responses: Sequence[InferenceResponse | RelayError]) -> bool:
    """Return whether a handler failed in a way that it did not report itself."""
    return any(
        isinstance(response, HandlerFailed) and not isinstance(response, HandlerRejected)
        for response in responses
    )


def _rendezvous(placement: RankPlacement, port: int = 0) -> Any:
    from handlers.distributed.process_group import Rendezvous  # late: torch may be the archive's own

    return Rendezvous(placement, port)


def _discard_chunk(index: int, chunk: bytes | InferenceResponse) -> None:
    """Drop a chunk of a stream: rank 0 sends them."""
