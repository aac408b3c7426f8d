"""Calls to one particular replica, on whatever machine it runs.

Ray Serve's handles choose a replica themselves, and offer no choice for an application behind HAProxy. So
this module calls the replica's actor, as a handle does after its choice; a test asserts that this works.
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

from serve_app.dataplane.backends import ConnectionLost
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseChunk, ResponseStream
from serve_app.errors import RelayError, ReplicaDied


class ActorClient:
    """A client of the actors of one version; ``app`` is the name of its application and deployment."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._actors: dict[str, asyncio.Future[Any]] = {}

    async def infer(self, replica: str, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        """Return the replica's response. Raises RelayError, and ConnectionLost where the replica is dead."""
        actor = await self._actor(replica)
        chunks = actor.handle_request_streaming.options(num_returns="streaming").remote(
            self._request_metadata("stream"), request
        )
        try:
            first: ResponseChunk | RelayError = await (await chunks.__anext__())
        except asyncio.CancelledError:
            ray.cancel(chunks)
            raise
        except RayError as error:
            raise self._mark_lost(replica) from error
        if isinstance(first, RelayError):
            raise first
        assert first.head is not None
        return first.head if first.last else ResponseStream(first.head, _remaining_chunks(first, chunks))

    async def holds(self, replica: str, sequence: str) -> bool:
        """Return whether the replica has the state of this sequence. Raises ConnectionLost."""
        actor = await self._actor(replica)
        try:
            return bool(await actor.handle_request.remote(self._request_metadata("holds"), sequence))
        except RayError as error:
            raise self._mark_lost(replica) from error

    async def load(self, host: str, spec: ModelSpec) -> RelayError | None:
        """Let a host of a pool load a version, and return its error. Raises ConnectionLost."""
        actor = await self._actor(host)
        try:
            error: RelayError | None = await actor.handle_request.remote(self._request_metadata("load"), spec)
        except RayError as lost:
            raise self._mark_lost(host) from lost
        return error

    async def _actor(self, replica: str) -> Any:
        # Concurrent callers wait for the same look-up, so that requests keep their order.
        lookup = self._actors.get(replica)
        if lookup is None:
            name = ReplicaID(replica, DeploymentID(self._app, self._app)).to_full_id_str()
            lookup = self._actors[replica] = asyncio.ensure_future(
                asyncio.to_thread(ray.get_actor, name, namespace=SERVE_NAMESPACE)
            )
        try:
            return await asyncio.shield(lookup)
        except ValueError:  # no actor has this name any more
            raise self._mark_lost(replica) from None

    def _request_metadata(self, method: str) -> bytes:
        streams = method == "stream"
        one = str(uuid4())
        return pickle.dumps(RequestMetadata(one, one, method, app_name=self._app, is_streaming=streams))

    def _mark_lost(self, replica: str) -> ConnectionLost:
        self._actors.pop(replica, None)
        return ConnectionLost()


async def _remaining_chunks(first: ResponseChunk, chunks: Any) -> AsyncIterator[bytes]:
    try:
        yield first.body
        async for item in chunks:
            chunk: ResponseChunk | RelayError = await item
            if isinstance(chunk, RelayError):
                raise chunk
            yield chunk.body
    except (asyncio.CancelledError, GeneratorExit):
        ray.cancel(chunks)  # the client disconnected
        raise
    except RayError:
        raise ReplicaDied("the replica was lost in mid-stream") from None
