"""A replica over several processes: the ranks beside it, and the one order in which all of them work."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_app.deployments.archive import Archive
from serve_app.errors import HandlerFailed, HandlerSaid, RelayError, StartFailed, WorkerDied
from serve_app.runtime.answer import Emit
from serve_app.runtime.author import Author
from serve_app.runtime.concurrent import run_until_stopped
from serve_app.runtime.runner import Runner
from serve_app.settings import Settings
from serve_app.telemetry import logs, torchserve
from serve_app.telemetry.logs import Speaker
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, ModelSpec, Reply

if TYPE_CHECKING:
    from handlers.sharding import Place

log = logging.getLogger("torchrelay.sharded")

_FOLLOWS = 10.0  # seconds after rank 0 in which the others must be done with a batch
_SIGN_OF_LIFE = 5.0  # seconds in which every rank answers a look at its health


class Rank:
    """One of the ranks from 1 on: rank 0's archive, handler and batches. What its handler answers goes nowhere.

    An asynchronous handler is asked at rank 0 alone, and keeps its ranks in step itself, as an engine does.
    """

    def __init__(self, spec: ModelSpec, settings: Settings, management: Any, replica: str, rank: int) -> None:
        speaker = Speaker.of_replica(spec.name, spec.version, f"{replica}-rank{rank}")
        logs.configure(settings, speaker, spec.config.get("log_level"))
        self._spec = spec
        self._archive = Archive(spec, settings, management)
        self._metrics = Meters(torchserve.meters_of(settings)).torchserve.cache(spec.name)  # the author's; never read
        self._author = Author()

    async def load(self, place: Place, port: int) -> StartFailed | None:
        """Load this rank's shard, together with all other ranks; what kept it from that is returned."""
        spec = self._spec
        try:
            directory = await self._archive.open()
            if spec.requirements:
                await asyncio.to_thread(self._archive.install, directory)
            self._runner = self._archive.runner(directory, self._metrics)
            await asyncio.get_running_loop().run_in_executor(self._author, self._load, place, port)
        except StartFailed as error:
            return error
        except Exception as error:
            why = str(error) if isinstance(error, RelayError) else traceback.format_exc()
            return StartFailed(spec.name, spec.version, f"rank {place.rank} of {place.world}: {why}")
        logs.mend()
        return None

    def _load(self, place: Place, port: int) -> None:
        from handlers.sharding import Rendezvous  # late: it imports torch, which may be the archive's own

        Rendezvous(place, port).join()
        self._runner.load()
        if self._runner.loop is None:
            self._runner.warm_up()
        else:  # rank 0 alone is asked; what the others do in the handler's own loop goes on in this thread
            self._author.post(run_until_stopped, self._runner.loop)

    async def run(self, sent: bytes) -> bool:
        """The handler's part in a batch of pickled calls; whether it failed."""
        loop = asyncio.get_running_loop()
        return failed(await loop.run_in_executor(self._author, self._runner.run, pickle.loads(sent), _nobody))

    async def check_health(self) -> None:
        """Answered while this process lives and its handler is well."""
        await self._runner.check_health()

    async def sequence_ended(self, name: str, why: str) -> None:
        self._author.post(self._runner.sequence_ended, name, why)

    async def watch(self) -> None:
        """Never answered; it fails when this process ends."""
        await asyncio.Event().wait()


class Group:
    """The ranks of a replica that is rank 0 itself, in bundle 0 of its placement group. Made on the event loop.

    They live and die together: a process group that lost a rank never heals, so ``lost`` says when the replica
    has to end, and Ray ends the others with it.
    """

    def __init__(self, spec: ModelSpec, settings: Settings, management: Any, replica: str, author: Author) -> None:
        self._spec = spec
        self._author = author
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._broken = ""  # the same, for the author's thread
        self._bundles = get_current_placement_group()
        self._ranks = [
            ray.remote(Rank)
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
        """What ``load`` gives in the author's thread, while the other ranks do the same. Raises StartFailed."""
        spec = self._spec
        places = await asyncio.to_thread(self._places)
        rendezvous = await self._loop.run_in_executor(self._author, _rendezvous, places[0])

        def together() -> Runner:
            rendezvous.join()
            return load()

        async def other(number: int) -> None:
            error = await self._ranks[number - 1].load.remote(places[number], rendezvous.port)
            if error is not None:
                raise error

        mine = self._loop.run_in_executor(self._author, together)
        loading = asyncio.gather(mine, *(other(place.rank) for place in places[1:]))
        await asyncio.wait([loading, self._lost], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            raise StartFailed(spec.name, spec.version, self._lost.result())
        self._runner: Runner = (await loading)[0]
        return self._runner

    def _places(self) -> list[Place]:
        from handlers.sharding import Place

        world, gpu = self._spec.ranks, self._spec.num_gpus > 0
        nodes = placement_group_table(self._bundles)["bundles_to_node_id"]
        address = get_node_ip_address()
        placed = [nodes[number] for number in range(world)]
        return [
            Place(number, world, placed[:number].count(node), placed.count(node), address, gpu)
            for number, node in enumerate(placed)
        ]

    def run(
        self, calls: Sequence[Call], emit: Emit, ahead: Sequence[Future[Any] | None] = ()
    ) -> list[Reply | RelayError]:
        """``Runner.run`` on every rank; the answers are rank 0's, or WorkerDied where another did not come along."""
        if self._broken:
            return [WorkerDied(self._broken)] * len(calls)
        sent = pickle.dumps(calls, pickle.HIGHEST_PROTOCOL)
        others = [rank.run.remote(sent) for rank in self._ranks]
        answers = self._runner.run(calls, emit, ahead)
        if not self._together(others, failed(answers)):
            return [WorkerDied(self._broken)] * len(calls)
        return answers

    def sequence_ended(self, name: str, why: str) -> None:
        """``Runner.sequence_ended`` on every rank, between two batches."""
        for rank in self._ranks:
            rank.sequence_ended.remote(name, why)
        self._runner.sequence_ended(name, why)

    def _together(self, others: Sequence[Any], mine: bool) -> bool:
        """Wait for the other ranks; whether they ended a batch as rank 0 did."""
        until = time.monotonic() + _FOLLOWS
        for number, other in enumerate(others, 1):
            try:
                if ray.get(other, timeout=max(0.0, until - time.monotonic())) is mine:
                    continue
                why = "answered a batch where rank 0 failed" if mine else "failed at a batch that rank 0 answered"
            except RayActorError:
                why = "ended"
            except GetTimeoutError:
                why = f"was not done with a batch {_FOLLOWS:g} s after rank 0"
            except RayError as error:
                why = f"could not run a batch: {error}"
            self._lose(number, why)
            return False
        return True

    async def _watch(self, number: int) -> None:
        try:
            await self._ranks[number - 1].watch.remote()
        except RayError as error:
            log.error("%s: rank %d: %s", self._spec.ref.app, number, error)
            self._lose(number, "ended")

    def _lose(self, number: int, why: str) -> None:
        """Note, from any thread, that the group is broken."""
        cure = "the replica starts anew, with all its ranks"
        self._broken = self._broken or f"rank {number} of {self._spec.ranks} {why}; {cure}"
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if not self._lost.done():
            self._lost.set_result(self._broken)

    async def lost(self) -> str:
        """Wait until a rank is lost; which, and how."""
        return await asyncio.shield(self._lost)

    async def check(self) -> None:
        """Raise where a rank does not say within seconds that it lives; lost is one whose handler is not well."""
        looks = [self._look(0, self._runner.check_health())]
        looks += [self._look(number, _health(rank)) for number, rank in enumerate(self._ranks, 1)]
        await asyncio.wait_for(asyncio.gather(*looks), _SIGN_OF_LIFE)

    async def _look(self, number: int, health: Awaitable[None]) -> None:
        try:
            await health
        except RayActorError:
            self._lose(number, "ended")
        except Exception as error:
            self._lose(number, f"is not well ({error.cause if isinstance(error, RayTaskError) else error})")

    def close(self) -> None:
        """End the other ranks."""
        for watch in self._watches:
            watch.cancel()
        for rank in self._ranks:
            ray.kill(rank)


def failed(answers: Sequence[Reply | RelayError]) -> bool:
    """Whether something went wrong in a handler that it did not mean to say."""
    return any(isinstance(answer, HandlerFailed) and not isinstance(answer, HandlerSaid) for answer in answers)


def _rendezvous(place: Place) -> Any:
    from handlers.sharding import Rendezvous

    return Rendezvous(place)


async def _health(rank: Any) -> None:
    await rank.check_health.remote()


def _nobody(index: int, piece: bytes | Reply) -> None:
    """Pieces of a streamed answer: rank 0 sends them."""
