"""Async predictions: requests that the server stores and answers later."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from serve_app.client._body import Body
from serve_app.client._operations import (
    JsonObject,
    Operation,
    RequestDescriptor,
    RequestFlow,
    fetch_list,
    fetch_object,
    join_path,
    management_request,
)
from serve_app.client.predictions import Prediction, PredictionOptions, prediction_request

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncPredictionOperations:
    """The routes under ``/async``; an async prediction is identified by its ``id``."""

    @Operation
    def submit_async(
        self,
        model: str,
        body: Body,
        content_type: str = "",
        version: str | None = None,
        *,
        key: str = "",
        webhook: str = "",
        explain: bool = False,
        **options: Unpack[PredictionOptions],
    ) -> RequestFlow[JsonObject]:
        """Submit an async prediction and return its document, with its ``id``.

        A second request with the same ``key`` returns the same prediction. The server sends a request to the
        URL ``webhook`` when the prediction ends. The other parameters are those of ``request``.
        """
        request = prediction_request(
            model, body, content_type, version, explain=explain, use_client_timeout=False, **options
        )
        headers = {**request.headers, "prefer": "respond-async"}
        if key:
            headers["idempotency-key"] = key
        if webhook:
            headers["x-torchrelay-webhook"] = webhook
        return (yield from fetch_object(replace(request, headers=headers)))

    @Operation
    def async_predictions(
        self, model: str | None = None, state: str | None = None, limit: int = 100
    ) -> RequestFlow[list[JsonObject]]:
        """Return the documents of the async predictions that the key may see, the newest first."""
        query = {"limit": limit, "model": model, "state": state}
        request = management_request("GET", "async", port="inference", query=query)
        return (yield from fetch_list(request, "predictions"))

    @Operation
    def async_status(self, id: str) -> RequestFlow[JsonObject]:
        """Return the document of an async prediction.

        Its ``state`` is queued, running, done, failed or cancelled.
        """
        return (yield from fetch_object(RequestDescriptor("inference", "GET", join_path("async", id))))

    @Operation
    def async_result(self, id: str) -> RequestFlow[Prediction | None]:
        """Return the response of an async prediction, None while there is none.

        Raises the errors of the prediction itself.
        """
        response = yield RequestDescriptor(
            "inference", "GET", join_path("async", id, "result"), retryable=False
        )
        state = response.headers.get("x-torchrelay-state")
        if response.status_code == 202 and state in ("queued", "running"):
            return None
        return Prediction(response.content, response.status_code, response.headers)

    @Operation
    def cancel_async(self, id: str) -> RequestFlow[None]:
        """Cancel an async prediction, or delete one that has ended."""
        yield RequestDescriptor("inference", "DELETE", join_path("async", id))
