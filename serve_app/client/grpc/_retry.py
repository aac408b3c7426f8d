"""The attempts of a gRPC call, and the rules for sending it again."""

from __future__ import annotations

from typing import Any

import grpc
import httpx

from serve_app.client.grpc import errors
from serve_app.client.grpc._operations import GrpcRequestDescriptor, GrpcStreamDescriptor, RequestStream
from serve_app.client.keys import EXPIRED, BearerAuth, KeyFile
from serve_app.client.retries import NO_RETRIES, Retries, RetryAttempts

Keys = BearerAuth | KeyFile | None


class GrpcRetryLoop(RetryAttempts):
    """The attempts of one call, which is sent until ``retry_delay`` returns None.

    ``has_response`` is set once a part of the response has been yielded. A stream of requests is sent once,
    as its iterable can be read once.
    """

    def __init__(
        self, request: GrpcRequestDescriptor, keys: Keys, retries: Retries, default_timeout: float | None
    ) -> None:
        self.has_response = False
        self.is_request_stream = isinstance(request.message, RequestStream)
        self._request = request
        self._keys = keys
        self._default_timeout = default_timeout  # seconds for a call without a timeout of its own
        self._renewed = False
        timeout = default_timeout if request.timeout is ... else request.timeout
        retryable = request.retryable and not self.is_request_stream
        super().__init__(retries if retryable else NO_RETRIES, timeout)

    def call_options(self) -> dict[str, Any]:
        """Return deadline and metadata of the next attempt."""
        authorization = self._keys.authorization() if self._keys is not None else None
        metadata = dict(self._request.metadata)
        if authorization is not None:
            metadata["authorization"] = authorization
        return {"timeout": self.start_attempt(), "metadata": tuple(metadata.items())}

    def idle_timeout(self, stream: GrpcStreamDescriptor[Any]) -> float | None:
        """Return the seconds in which a message of the stream must arrive.

        None where the stream has a deadline or may idle.
        """
        if self.is_request_stream or stream.may_idle or self._request.timeout is not None:
            return None
        return self._default_timeout

    def renewal_request(self, error: grpc.RpcError) -> httpx.Request | None:
        """Return the request that renews the key, where it has expired; at most once per call."""
        expired = errors.trailing_metadata(error).get("x-torchrelay-reason") == EXPIRED
        if self._renewed or not expired or not isinstance(self._keys, KeyFile):
            return None
        self._renewed = True
        return self._keys.renewal_request()

    def retry_delay(self, error: grpc.RpcError, renewed: bool) -> float | None:
        """Return the seconds after which to send the call again; None where ``error`` is final.

        ``renewed``: the key may have been renewed since.
        """
        if self.has_response or (renewed and self.is_request_stream):
            return None
        if renewed:
            return 0.0
        if errors.is_unconnected(error):
            return self.next_delay()
        return self.delay_after_refusal(errors.trailing_metadata(error))

    def raise_request_failure(self) -> None:
        """Raise the exception of the caller's own iterable of requests, if there was one."""
        if self.is_request_stream and self._request.message.failure is not None:
            raise self._request.message.failure
