"""OpenAI's API for the handler ``llm``: the objects and events of responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson

from handlers.engines.engine import Logprob
from handlers.engines.openai import CompletionRequest

DONE = b"data: [DONE]\n\n"


def list_models(name: str, adapters: Iterable[str] = ()) -> dict[str, Any]:
    """Return OpenAI's list of models: the handler's model ``name``, and ``name:adapter`` of its adapters."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "torchrelay"}
    adapted = [{**model, "id": f"{name}:{adapter}", "parent": name} for adapter in sorted(adapters)]
    return {"object": "list", "data": [model, *adapted]}


class CompletionResponse:
    """A builder of one response's objects and events, which share an id; ``decode`` converts a token."""

    def __init__(self, request: CompletionRequest, name: str, decode: Callable[[list[int]], str]) -> None:
        self._request = request
        self._decode = decode
        self._offsets: dict[int, int] = {}  # the text offset of each choice's next token
        self._started: set[int] = set()  # choices whose first event was built
        if request.chat:
            kind, self._object, self._chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
        else:
            kind, self._object, self._chunk_object = "cmpl", "text_completion", "text_completion"
        self._frame = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or name,
        }

    def build(self, choices: Sequence[dict[str, Any]], usage: Mapping[str, int]) -> dict[str, Any]:
        """Build the object of a response without a stream."""
        return {**self._frame, "object": self._object, "choices": list(choices), "usage": dict(usage)}

    def build_choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[Logprob],
        reason: str | None,
        calls: Sequence[Any] = (),
        stop: str | None = None,
    ) -> dict[str, Any]:
        """Build a choice of a response without a stream; ``calls`` come from ``tool_calls.py``.

        ``stop`` is the stop string that ended the text, if one did.
        """
        entries = self._build_logprobs(index, logprobs)
        if not self._request.chat:
            choice = {"index": index, "text": text, "logprobs": entries, "finish_reason": reason}
            return choice | _stop_reason(stop)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": list(calls)}
            reason = self._convert_reason(reason)
        choice = {"index": index, "message": message, "logprobs": entries, "finish_reason": reason}
        return choice | _stop_reason(stop)

    def text_event(self, index: int, text: str, logprobs: Sequence[Logprob]) -> bytes:
        """Build an event with new text."""
        entries = self._build_logprobs(index, logprobs)
        if not self._request.chat:
            return self._event({"index": index, "text": text, "logprobs": entries, "finish_reason": None})
        delta = {"content": text} if index in self._started else {"role": "assistant", "content": text}
        self._started.add(index)
        return self._event({"index": index, "delta": delta, "logprobs": entries, "finish_reason": None})

    def finish_events(
        self,
        index: int,
        text: str,
        logprobs: Sequence[Logprob],
        reason: str | None,
        calls: Sequence[Any] = (),
        stop: str | None = None,
    ) -> bytes:
        """Build a choice's last events: the rest of its text, if any, its ``calls`` and its finish reason."""
        events = (
            self.text_event(index, text, logprobs) if text or logprobs or index not in self._started else b""
        )
        if calls:
            delta = {"tool_calls": [{"index": position, **call} for position, call in enumerate(calls)]}
            events += self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            reason = self._convert_reason(reason)
        empty: dict[str, Any] = {"delta": {}} if self._request.chat else {"text": ""}
        choice = {"index": index, **empty, "logprobs": None, "finish_reason": reason}
        return events + self._event(choice | _stop_reason(stop))

    def done_events(self, usage: Mapping[str, int]) -> bytes:
        """Build the last events of a stream."""
        return (self._event(usage=dict(usage)) if self._request.include_usage else b"") + DONE

    def _convert_reason(self, reason: str | None) -> str | None:
        """Return the finish reason of a choice with tool calls; OpenAI's is ``stop`` for a named tool."""
        forced_call = self._request.forced_call
        is_named = forced_call is not None and forced_call.name is not None
        return "tool_calls" if reason == "stop" and not is_named else reason

    def _event(self, *choices: dict[str, Any], usage: dict[str, int] | None = None) -> bytes:
        event: dict[str, Any] = {**self._frame, "object": self._chunk_object, "choices": list(choices)}
        if self._request.include_usage:
            event["usage"] = usage
        return b"data: " + orjson.dumps(event) + b"\n\n"  # null for a log probability of minus infinity

    def _build_logprobs(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, Any] | None:
        if self._request.sampling.logprobs is None:
            return None
        tokens = [self._decode([logprob.token]) for logprob in logprobs]
        if self._request.chat:
            return {
                "content": [self._token_entry(token, logprob) for token, logprob in zip(tokens, logprobs)],
                "refusal": None,
            }
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.setdefault(index, 0))
            self._offsets[index] += len(token)
        top_logprobs = [
            None
            if logprob.logprob is None
            else {self._decode([token]): value for token, value in logprob.top_tokens}
            for logprob in logprobs
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [logprob.logprob for logprob in logprobs],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _token_entry(self, text: str, logprob: Logprob) -> dict[str, Any]:
        top_logprobs = [_entry(self._decode([token]), value) for token, value in logprob.top_tokens]
        return {**_entry(text, logprob.logprob), "top_logprobs": top_logprobs}


def _stop_reason(stop: str | None) -> dict[str, str]:
    """Return vLLM's field of a choice that a stop string has ended."""
    return {} if stop is None else {"stop_reason": stop}


def _entry(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": None if "\ufffd" in token else list(token.encode())}
