"""A typed client of everything that a server speaks over HTTP: ``Client``, and ``AsyncClient`` for asyncio.

The same by gRPC is in ``serve_app.client.grpc``, which only those load who use it.
"""

from serve_app.client.errors import (
    AccessDenied,
    BadRequest,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    HandlerFailed,
    Loading,
    MethodNotAllowed,
    NoReplica,
    NotFound,
    NotYet,
    QueueFull,
    QuotaExceeded,
    SequenceLost,
    ServerError,
    StartFailed,
    TooLarge,
    Unavailable,
    WorkerDied,
)
from serve_app.client.http import AsyncClient, Client
from serve_app.client.pieces import Event
from serve_app.client.predictions import Prediction
from serve_app.client.retries import NEVER, Retries
from serve_app.client.sockets import AsyncSocket, End, Socket

__all__ = [
    "NEVER",
    "AccessDenied",
    "AsyncClient",
    "AsyncSocket",
    "BadRequest",
    "Client",
    "Conflict",
    "DeadlineExceeded",
    "End",
    "Event",
    "Forbidden",
    "HandlerFailed",
    "Loading",
    "MethodNotAllowed",
    "NoReplica",
    "NotFound",
    "NotYet",
    "Prediction",
    "QueueFull",
    "QuotaExceeded",
    "Retries",
    "SequenceLost",
    "ServerError",
    "Socket",
    "StartFailed",
    "TooLarge",
    "Unavailable",
    "WorkerDied",
]
