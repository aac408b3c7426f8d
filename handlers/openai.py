"""OpenAI's API for the handler ``llm``: what a body asks of it, and the objects and events that it answers.

Completions and chat completions as OpenAI's API reference has them (platform.openai.com/docs/api-reference).
Nothing here generates: a ``Question`` is read, and an ``Answer`` is written.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlers.engines.engine import Logprob, Sampling
from handlers.errors import PredictionException

MODELS = "v1/models"
COMPLETIONS = "v1/completions"
CHAT = "v1/chat/completions"

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"

_CHOICES = 128  # of one request
_STOPS = 16
_LIKELIEST = {COMPLETIONS: 5, CHAT: 20}  # beside each token

_SAID = {"model", "temperature", "top_p", "top_k", "seed", "stop", "n", "max_tokens", "stream", "stream_options"}
_WORDS = {
    COMPLETIONS: _SAID | {"prompt", "logprobs", "echo"},
    CHAT: _SAID | {"messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice"},
}
# What changes no answer of ours.
_IDLE = {
    "user",
    "metadata",
    "moderation",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
}
# What is not served, and the values of it that ask for nothing; null never does.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_CALLED = {"stop": "tool_calls"}  # why a choice ended, where it calls tools
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True)
class Question:
    """A body that was read. Of ``prompts`` (texts, or token ids) each gets ``n`` choices; a chat has ``messages``."""

    path: str
    model: str
    sampling: Sampling
    stops: tuple[str, ...]
    n: int = 1
    max_new_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    prompts: tuple[str | list[int], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def chat(self) -> bool:
        return self.path == CHAT


def read(path: str, row: Mapping[str, Any], default: Sampling) -> Question:
    """What a row asks at ``path``. Raises PredictionException, which names what is wrong and what it may be."""
    if path not in _WORDS:
        places = f"{MODELS}, {COMPLETIONS} and {CHAT}"
        raise PredictionException(f"Unknown API endpoint: {path}. There are {places}.", 404)
    body = {word: value for word, value in _body(row).items() if value is not None and word not in _IDLE}
    for word, value in body.items():
        neutral = _UNSERVED.get(word)
        if neutral is None and word not in _WORDS[path]:
            raise PredictionException(f"{word!r} is not known here: there are {', '.join(sorted(_WORDS[path]))}.", 400)
        if neutral is not None and value not in neutral and not (word == "best_of" and value == body.get("n")):
            raise PredictionException(f"{word} is not served: leave it out.", 400)
    n = _number(body, "n", int, 1, 1, _CHOICES)
    asked = _chat(body) if path == CHAT else _completion(body)
    logprobs = asked.pop("logprobs")
    if n * (1 if path == CHAT else len(asked["prompts"])) > _CHOICES:
        raise PredictionException(f"n times the prompts is at most {_CHOICES}: send several requests.", 400)
    stream = _flag(body, "stream")
    options = body.get("stream_options", {})
    if not isinstance(options, Mapping) or (options and not stream):
        raise PredictionException('stream_options is an object beside "stream": true.', 400)
    return Question(
        path,
        _text(body, "model", ""),
        Sampling(
            _number(body, "temperature", float, default.temperature or 1.0, 0, 2),
            _number(body, "top_k", int, default.top_k, 0, None),
            _number(body, "top_p", float, default.top_p, 0, 1),
            _number(body, "seed", int, default.seed, -(2**63), 2**63 - 1),
            logprobs,
        ),
        _stops(body.get("stop")),
        n,
        stream=stream,
        include_usage=_flag(options, "include_usage"),
        **asked,
    )


def _completion(body: Mapping[str, Any]) -> dict[str, Any]:
    logprobs = _number(body, "logprobs", int, None, 0, _LIKELIEST[COMPLETIONS])
    echo = _flag(body, "echo")
    if echo and logprobs is not None:
        raise PredictionException("echo together with logprobs is not served: ask for one of them.", 400)
    return {
        "prompts": _prompts(body.get("prompt")),
        "max_new_tokens": _number(body, "max_tokens", int, None, 1, None),
        "logprobs": logprobs,
        "echo": echo,
    }


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    if "max_tokens" in body and "max_completion_tokens" in body:
        raise PredictionException("max_completion_tokens is the new name of max_tokens: give one of them.", 400)
    word = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
    likeliest = _number(body, "top_logprobs", int, None, 0, _LIKELIEST[CHAT])
    wanted = _flag(body, "logprobs")
    if likeliest is not None and not wanted:
        raise PredictionException('top_logprobs goes with "logprobs": true.', 400)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise PredictionException('messages is a list: [{"role": "user", "content": "Hello"}].', 400)
    return {
        "messages": tuple(_message(place, message) for place, message in enumerate(messages)),
        "max_new_tokens": _number(body, word, int, None, 1, None),
        "logprobs": (likeliest or 0) if wanted else None,
        "tools": _tools(body),
    }


def _message(place: int, message: Any) -> dict[str, Any]:
    """As chat templates want it: content is one text, and the arguments of tool calls are objects."""
    where = f"messages[{place}]"
    role = _ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None
    if role is None:
        raise PredictionException(f"{where} has a role, which is one of {', '.join(_ROLES)}, and content.", 400)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(where, part) for part in content)
    if not isinstance(content, str) and not (content is None and role == "assistant"):
        raise PredictionException(f"{where}.content is a text, or a list of parts of type text.", 400)
    made = {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    made |= {"role": role, "content": content or ""}
    if message.get("tool_calls"):
        try:
            made["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        except (TypeError, KeyError, ValueError):
            raise PredictionException(f"{where}.tool_calls are not such as a model's answer has.", 400) from None
    return made


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise PredictionException(f"{where}.content has a part of type {kind!r}, and this model reads texts.", 400)
    return text


def _tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PredictionException("tools is a list of objects.", 400)
    if choice not in ("auto", "none"):
        raise PredictionException('tool_choice is "auto" or "none": the model cannot be made to call a tool.', 400)
    return tuple(tools) if choice == "auto" else ()


def _body(row: Mapping[str, Any]) -> Mapping[str, Any]:
    body = row.get("body", row.get("data"))
    if isinstance(body, (str, bytes, bytearray, memoryview)):
        try:
            body = json.loads(body if isinstance(body, str) else bytes(body))
        except ValueError as error:
            raise PredictionException(f"The body is no JSON: {error}.", 400) from None
    if not isinstance(body, Mapping):
        raise PredictionException("The body is a JSON object.", 400)
    return body


def _prompts(said: Any) -> tuple[str | list[int], ...]:
    if isinstance(said, str):
        return (said,)
    if isinstance(said, list) and said:
        if all(type(token) is int for token in said):
            return (said,)
        if all(isinstance(one, str) for one in said):
            return tuple(said)
        if all(isinstance(one, list) and one and all(type(token) is int for token in one) for one in said):
            return tuple(said)
    raise PredictionException("prompt is a text, a list of texts, a list of token ids, or a list of such lists.", 400)


def _stops(said: Any) -> tuple[str, ...]:
    stops = [said] if isinstance(said, str) else said or []
    if isinstance(stops, list) and len(stops) <= _STOPS and all(isinstance(stop, str) and stop for stop in stops):
        return tuple(stops)
    raise PredictionException(f"stop is a text, or a list of up to {_STOPS} texts, none of them empty.", 400)


def _number(
    body: Mapping[str, Any], word: str, kind: Callable[[Any], Any], default: Any, least: float, most: float | None
) -> Any:
    value = body.get(word)
    if value is None:
        return default
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least
    if not right or (kind is int and value != value // 1) or (most is not None and value > most):
        what = "a whole number" if kind is int else "a number"
        limits = f"from {least}" if most is None else f"from {least} to {most}"
        raise PredictionException(f"{word} is {value!r:.100}; it is {what} {limits}.", 400)
    return kind(value)


def _flag(body: Mapping[str, Any], word: str) -> bool:
    value = body.get(word, False)
    if not isinstance(value, bool):
        raise PredictionException(f"{word} is {value!r:.100}; it is true or false.", 400)
    return value


def _text(body: Mapping[str, Any], word: str, default: str) -> str:
    value = body.get(word, default)
    if not isinstance(value, str):
        raise PredictionException(f"{word} is {value!r:.100}; it is a text.", 400)
    return value


# Answers


def called(message: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The text and the calls of a message that a tokenizer has parsed. Raises KeyError and TypeError."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments", {})
        said = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(
            {
                "id": f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": function["name"], "arguments": said},
            }
        )
    return message.get("content") or "", calls


def models(name: str) -> dict[str, Any]:
    """The one model that a handler is."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "torchrelay"}]}


class Answer:
    """The objects and events of one answer, which share an id. ``decode`` makes the text of one token."""

    def __init__(self, question: Question, name: str, decode: Callable[[list[int]], str]) -> None:
        self._question = question
        self._decode = decode
        self._offsets: dict[int, int] = {}  # of each choice's next token in its text
        self._begun: set[int] = set()  # choices whose first event has left
        if question.chat:
            kind, self._object, self._of_pieces = "chatcmpl", "chat.completion", "chat.completion.chunk"
        else:
            kind, self._object, self._of_pieces = "cmpl", "text_completion", "text_completion"
        self._frame = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": question.model or name,
        }

    def whole(self, choices: Sequence[dict[str, Any]], usage: Mapping[str, int]) -> dict[str, Any]:
        """The object that answers without a stream."""
        return {**self._frame, "object": self._object, "choices": list(choices), "usage": dict(usage)}

    def choice(
        self, index: int, text: str, logprobs: Sequence[Logprob], reason: str, calls: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """One choice of the whole; ``calls`` are of tools, as ``called`` has them."""
        said = self._logprobs(index, logprobs)
        if not self._question.chat:
            return {"index": index, "text": text, "logprobs": said, "finish_reason": reason}
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": list(calls)}
            reason = _CALLED.get(reason, reason)
        return {"index": index, "message": message, "logprobs": said, "finish_reason": reason}

    def piece(self, index: int, text: str, logprobs: Sequence[Logprob]) -> bytes:
        """An event with text that is new."""
        said = self._logprobs(index, logprobs)
        if not self._question.chat:
            return self._event({"index": index, "text": text, "logprobs": said, "finish_reason": None})
        delta = {"content": text} if index in self._begun else {"role": "assistant", "content": text}
        self._begun.add(index)
        return self._event({"index": index, "delta": delta, "logprobs": said, "finish_reason": None})

    def end(
        self, index: int, text: str, logprobs: Sequence[Logprob], reason: str, calls: Sequence[Any] = ()
    ) -> bytes:
        """The last events of a choice: the rest of its text, if any, its ``calls``, and why it ended."""
        rest = self.piece(index, text, logprobs) if text or logprobs or index not in self._begun else b""
        if calls:
            delta = {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]}
            rest += self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            reason = _CALLED.get(reason, reason)
        ended: dict[str, Any] = {"delta": {}} if self._question.chat else {"text": ""}
        return rest + self._event({"index": index, **ended, "logprobs": None, "finish_reason": reason})

    def done(self, usage: Mapping[str, int]) -> bytes:
        """The last events of a stream."""
        return (self._event(usage=dict(usage)) if self._question.include_usage else b"") + DONE

    def _event(self, *choices: dict[str, Any], usage: dict[str, int] | None = None) -> bytes:
        said: dict[str, Any] = {**self._frame, "object": self._of_pieces, "choices": list(choices)}
        if self._question.include_usage:
            said["usage"] = usage
        return b"data: " + json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def _logprobs(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, Any] | None:
        if self._question.sampling.logprobs is None:
            return None
        tokens = [self._decode([one.token]) for one in logprobs]
        if self._question.chat:
            return {"content": [self._likely(token, one) for token, one in zip(tokens, logprobs)], "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.setdefault(index, 0))
            self._offsets[index] += len(token)
        likeliest = [{self._decode([token]): chance for token, chance in one.likeliest} for one in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }

    def _likely(self, token: str, one: Logprob) -> dict[str, Any]:
        likeliest = [_chance(self._decode([other]), chance) for other, chance in one.likeliest]
        return {**_chance(token, one.logprob), "top_logprobs": likeliest}


def _chance(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": None if "\ufffd" in token else list(token.encode())}
