"""A call to one particular replica, on whatever machine it runs.

Ray Serve's handles choose a replica themselves, and let nobody choose for an application that HAProxy sends requests
to. So this speaks to the replica's actor, as a handle does once it has chosen; a test asserts that it still may.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.constants import SERVE_NAMESPACE

from serve_app.deployments.hop import HopLost
from serve_app.errors import RelayError, WorkerDied
from serve_app.types import Call, Chunk, Reply, ReplyStream


class Direct:
    """The actors of one version's replicas; ``app`` is what the version's application and deployment are called."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._actors: dict[str, asyncio.Future[Any]] = {}

    async def infer(self, replica: str, call: Call) -> Reply | ReplyStream:
        """The replica's answer. Raises RelayError, and HopLost where it is dead."""
        actor = await self._actor(replica)
        answers = actor.handle_request_streaming.options(num_returns="streaming").remote(self._asks("stream"), call)
        try:
            first: Chunk | RelayError = await (await answers.__anext__())
        except asyncio.CancelledError:
            ray.cancel(answers)
            raise
        except RayError as error:
            raise self._lost(replica) from error
        if isinstance(first, RelayError):
            raise first
        assert first.head is not None
        return first.head if first.last else ReplyStream(first.head, _rest(first, answers))

    async def holds(self, replica: str, sequence: str) -> bool:
        """Whether the replica has the state of this sequence. Raises HopLost."""
        actor = await self._actor(replica)
        try:
            return bool(await actor.handle_request.remote(self._asks("holds"), sequence))
        except RayError as error:
            raise self._lost(replica) from error

    async def _actor(self, replica: str) -> Any:
        # Whoever asks meanwhile waits for the same look-up, so that calls stay in the order in which they came.
        found = self._actors.get(replica)
        if found is None:
            name = ReplicaID(replica, DeploymentID(self._app, self._app)).to_full_id_str()
            found = self._actors[replica] = asyncio.ensure_future(
                asyncio.to_thread(ray.get_actor, name, namespace=SERVE_NAMESPACE)
            )
        try:
            return await asyncio.shield(found)
        except ValueError:  # there is none of this name any more
            raise self._lost(replica) from None

    def _asks(self, method: str) -> bytes:
        streams = method == "stream"
        one = str(uuid4())
        return pickle.dumps(RequestMetadata(one, one, method, app_name=self._app, is_streaming=streams))

    def _lost(self, replica: str) -> HopLost:
        self._actors.pop(replica, None)
        return HopLost()


async def _rest(first: Chunk, answers: Any) -> AsyncIterator[bytes]:
    try:
        yield first.body
        async for answer in answers:
            chunk: Chunk | RelayError = await answer
            if isinstance(chunk, RelayError):
                raise chunk
            yield chunk.body
    except (asyncio.CancelledError, GeneratorExit):
        ray.cancel(answers)  # the caller left
        raise
    except RayError:
        raise WorkerDied("the replica was lost in mid-stream") from None
