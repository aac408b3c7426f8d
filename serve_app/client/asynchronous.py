"""Predictions that are asked for now and answered later."""

from __future__ import annotations

from typing import Any

from serve_app.client.ask import Ask, Talk, operation, path
from serve_app.client.forms import Body
from serve_app.client.predictions import Prediction, asked


class Asynchronous:
    """A request that is put aside has an ``id``, by which how far it is and its answer can be asked for."""

    @operation
    def defer(
        self,
        model: str,
        body: Body,
        content_type: str = "",
        version: str | None = None,
        *,
        key: str = "",
        webhook: str = "",
        **more: Any,
    ) -> Talk[dict[str, Any]]:
        """Put a prediction aside; its document, with its ``id``. ``more`` is that of ``ask``.

        Asked again with the same ``key`` it is the same one. ``webhook`` is a URL that is told of the end.
        """
        named = {**(more.pop("headers", None) or {}), "prefer": "respond-async"}
        if key:
            named["idempotency-key"] = key
        if webhook:
            named["x-torchrelay-webhook"] = webhook
        return (yield asked(model, body, content_type, version, headers=named, hurries=False, **more)).json()

    @operation
    def deferral(self, id: str) -> Talk[dict[str, Any]]:
        """How far it is: its ``state`` is queued, running, done, failed or cancelled."""
        return (yield Ask("inference", "GET", path("async", id))).json()

    @operation
    def deferred(self, id: str) -> Talk[Prediction | None]:
        """Its answer, or None while it has none. Raises what the prediction itself would have raised."""
        answer = yield Ask("inference", "GET", path("async", id, "result"), once=True)
        if answer.status_code == 202 and answer.headers.get("x-torchrelay-state") in ("queued", "running"):
            return None
        return Prediction(answer.content, answer.status_code, answer.headers)

    @operation
    def cancel(self, id: str) -> Talk[None]:
        """Stop it; one that has ended is forgotten."""
        yield Ask("inference", "DELETE", path("async", id))
