"""A typed client of a server's prediction and management APIs: ``Client``, or ``AsyncClient`` for asyncio."""

from serve_app.client import errors
from serve_app.client._decoders import ServerSentEvent
from serve_app.client.errors import *  # noqa: F403
from serve_app.client.http import AsyncClient, Client
from serve_app.client.predictions import Prediction
from serve_app.client.retries import NO_RETRIES, Retries

__all__ = ["NO_RETRIES", "AsyncClient", "Client", "Prediction", "Retries", "ServerSentEvent"]
__all__ += errors.__all__
