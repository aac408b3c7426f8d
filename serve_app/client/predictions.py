"""Predictions and explanations: any body in, any body out, whole or in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import httpx

from serve_app.client.ask import Ask, Dial, Listen, Talk, connecting, operation, path, streaming
from serve_app.client.forms import Body, encode
from serve_app.client.pieces import Chunks

Urgency = Literal["high", "normal", "low"]
# As TorchServe has them where nobody calls them otherwise (runtime.header_key_sequence_...).
SEQUENCE, ENDS = "ts_request_sequence_id", "ts_request_sequence_end"


@dataclass(frozen=True)
class Prediction:
    """What a model answered, and what the server said of it.

    ``version`` is the one that answered, ``arm`` the trial that counted the call and its arm there, ``request_id`` is
    what rewards name.
    """

    body: bytes
    status: int
    headers: httpx.Headers

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    @property
    def version(self) -> str:
        return self.headers.get("x-model-version", "")

    @property
    def arm(self) -> str:
        return self.headers.get("x-torchrelay-arm", "")

    @property
    def request_id(self) -> str:
        return self.headers.get("x-request-id", "")

    @property
    def sequence(self) -> str:
        """The sequence that the call belonged to, as the next call of it names it; empty where it was of none."""
        return self.headers.get(SEQUENCE, "")

    def json(self) -> Any:
        return json.loads(self.body)


class Predictions:
    """Calls of models, and of workflows, which are called by their names as models are.

    ``body`` is bytes, text, or a mapping of names to parts, which is sent as ``multipart/form-data``: a handler gets
    each by its name. A part that is text is a field; bytes, or ``(file name, bytes, content type)``, are a file.
    ``timeout`` are the seconds for all of a call, its waits and further attempts included; the server is told, and
    drops what would come too late. Without it a call has the client's own. ``headers`` go to the handler. ``sequence``
    names the sequence of a stateful model's call, which begins one where it names none; ``ends`` says that it is the
    last of it.
    """

    @operation
    def ask(
        self,
        model: str,
        body: Body,
        content_type: str = "",
        version: str | None = None,
        *,
        explain: bool = False,
        timeout: float | None = None,
        priority: Urgency = "normal",
        headers: Mapping[str, str] | None = None,
        sequence: str = "",
        ends: bool = False,
    ) -> Talk[Prediction]:
        """A model's answer, or with ``explain`` its explanation, with everything that was said of it."""
        how = {"explain": explain, "timeout": timeout, "priority": priority, "headers": headers}
        answer = yield asked(model, body, content_type, version, **how, sequence=sequence, ends=ends)
        return Prediction(answer.content, answer.status_code, answer.headers)

    @operation
    def predict(
        self, model: str, body: Body, content_type: str = "", version: str | None = None, **more: Any
    ) -> Talk[bytes]:
        """The body of a model's answer; ``more`` is that of ``ask``."""
        return (yield asked(model, body, content_type, version, **more)).content

    @operation
    def predict_json(self, model: str, value: Any, version: str | None = None, **more: Any) -> Talk[Any]:
        """A model's answer to a JSON value, as a JSON value; ``more`` is that of ``ask``."""
        return (yield asked(model, json.dumps(value), "application/json", version, **more)).json()

    @operation
    def explain(
        self, model: str, body: Body, content_type: str = "", version: str | None = None, **more: Any
    ) -> Talk[bytes]:
        """The body of a model's explanation; ``more`` is that of ``ask``."""
        return (yield asked(model, body, content_type, version, explain=True, **more)).content

    @operation
    def explain_json(self, model: str, value: Any, version: str | None = None, **more: Any) -> Talk[Any]:
        """A model's explanation of its answer to a JSON value, as a JSON value; ``more`` is that of ``ask``."""
        return (yield asked(model, json.dumps(value), "application/json", version, explain=True, **more)).json()

    @streaming
    def stream(
        self, model: str, body: Body, content_type: str = "", version: str | None = None, **more: Any
    ) -> Listen[bytes]:
        """The pieces of a model's answer as they come; ``more`` is that of ``ask``.

        A stream that breaks off raises httpx.RemoteProtocolError: a part is never taken for the whole. ``timeout`` is
        that of the whole stream, and it has none unless it is given one.
        """
        return Listen(asked(model, body, content_type, version, hurries=False, **more), Chunks())

    @connecting
    def connect(
        self,
        model: str,
        version: str | None = None,
        content_type: str = "",
        *,
        timeout: float | None = None,
        priority: Urgency = "normal",
        headers: Mapping[str, str] | None = None,
        sequence: str = "",
    ) -> Dial:
        """A WebSocket to a model, to be opened by ``with``; what is said here holds for all that is sent over it.

        ``timeout`` are the seconds for each answer, and there are none unless it is given.
        """
        ask = asked(model, b"", content_type, version, False, None, priority, headers, sequence, hurries=False)
        named = {**ask.headers, **({"x-request-timeout-seconds": str(timeout)} if timeout is not None else {})}
        return Dial(replace(ask, port="socket", method="GET", headers=named, also=(101,)), timeout)


def asked(
    model: str,
    body: Body,
    content_type: str,
    version: str | None,
    explain: bool = False,
    timeout: float | None = None,
    priority: Urgency = "normal",
    headers: Mapping[str, str] | None = None,
    sequence: str = "",
    ends: bool = False,
    hurries: bool = True,
) -> Ask:
    """The request of a prediction."""
    named = httpx.Headers(headers)
    content, kind = encode(body, content_type)
    if kind:
        named["content-type"] = kind
    if sequence:
        named[SEQUENCE] = sequence
    if ends:
        named[ENDS] = "true"
    if priority != "normal":
        named["x-request-priority"] = priority
    where = path("explanations" if explain else "predictions", model, version)
    return Ask("inference", "POST", where, headers=named, content=content, within=timeout, hurries=hurries)
