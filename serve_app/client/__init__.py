"""A typed client of every HTTP API of a server: ``Client``, and ``AsyncClient`` for asyncio.

The gRPC clients are in ``serve_app.client.grpc``, which is not imported here: it loads grpc.
"""

from serve_app.client._decoders import ServerSentEvent
from serve_app.client.errors import (
    AuthenticationError,
    BadRequestError,
    ConflictError,
    DeadlineExceededError,
    HandlerFailedError,
    InProgressError,
    MethodNotAllowedError,
    ModelLoadingError,
    NoReplicaError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    QuotaExceededError,
    ReplicaDiedError,
    RequestTooLargeError,
    SequenceLostError,
    ServerError,
    StartFailedError,
    UnavailableError,
)
from serve_app.client.http import AsyncClient, Client
from serve_app.client.predictions import Prediction
from serve_app.client.retries import NO_RETRIES, Retries
from serve_app.client.websocket import AsyncSocket, Socket, StreamEnd

__all__ = [
    "NO_RETRIES",
    "AsyncClient",
    "AsyncSocket",
    "AuthenticationError",
    "BadRequestError",
    "Client",
    "ConflictError",
    "DeadlineExceededError",
    "HandlerFailedError",
    "InProgressError",
    "MethodNotAllowedError",
    "ModelLoadingError",
    "NoReplicaError",
    "NotFoundError",
    "PermissionDeniedError",
    "Prediction",
    "QueueFullError",
    "QuotaExceededError",
    "ReplicaDiedError",
    "RequestTooLargeError",
    "Retries",
    "SequenceLostError",
    "ServerError",
    "ServerSentEvent",
    "Socket",
    "StartFailedError",
    "StreamEnd",
    "UnavailableError",
]
