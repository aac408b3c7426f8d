"""Anthropic's messages as chat completions: the translation of a request, its response and its events.

Source: docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import orjson
from typing_extensions import NotRequired, TypedDict

from serve_app.domain import exact_json
from serve_app.domain.validation import documented
from serve_app.protocols.anthropic import errors
from serve_app.protocols.openai.errors import InvalidField, OpenAIErrorFields
from serve_app.protocols.openai.fields import find_ignored

Json = dict[str, Any]

_SAMPLING = ("temperature", "top_p", "top_k")
_ROLES = ("user", "assistant", "system")
_WITHOUT_EFFECT = (
    *("cache_control", "inference_geo", "metadata", "service_tier"),
    *("thinking", "output_config"),  # the effort, and thoughts, of models that reason
)
_UNSUPPORTED = ("container", "context_management", "mcp_servers")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


class AnthropicMessage(TypedDict):
    role: str
    content: Annotated[str | list[Any], documented("A text, or text, image, tool_use, tool_result blocks.")]


class CountTokensBody(TypedDict):
    model: Annotated[str, documented("name, name:version, name:adapter or name:version:adapter", minLength=1)]
    messages: list[AnthropicMessage]
    system: NotRequired[str | list[Any]]
    tools: NotRequired[list[Any]]
    tool_choice: NotRequired[Json]


class MessagesBody(CountTokensBody):
    max_tokens: Annotated[int, documented(minimum=1)]
    stop_sequences: NotRequired[list[str]]
    temperature: NotRequired[float]
    top_p: NotRequired[float]
    top_k: NotRequired[int]
    stream: NotRequired[bool]


class TokenCount(TypedDict):
    input_tokens: int


_KNOWN = {*MessagesBody.__annotations__, *_WITHOUT_EFFECT}


class MessagesTranslation:
    """A request, which becomes ``chat``, and the state of its response. Raises InvalidField."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        given = {name: value for name, value in body.items() if value is not None}
        self.ignored = find_ignored(body, _KNOWN)
        self.stream = given.get("stream", False)
        if not isinstance(self.stream, bool):
            raise InvalidField("stream is true or false.", "stream")
        max_tokens = given.get("max_tokens")
        if type(max_tokens) is not int or max_tokens < 1:
            raise InvalidField("max_tokens is required: a whole number from 1.", "max_tokens")
        self.chat = build_chat(given) | {"max_tokens": max_tokens}
        self.chat |= {name: given[name] for name in _SAMPLING if name in given}
        if "stop_sequences" in given:
            self.chat["stop"] = _check_stops(given["stop_sequences"])
        if self.stream:
            self.chat["stream_options"] = {"include_usage": True}
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": given.get("model"),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        self._usage: Mapping[str, Any] = {}
        self._choice: Mapping[str, Any] = {}  # the one that has the finish reason
        self._blocks = 0
        self._open: str | int | None = None  # the open block: "text", or the index of a tool call
        self._has_calls = False

    def encode(self, completion: Mapping[str, Any]) -> bytes:
        """Return the message of a whole chat completion."""
        self._choice, self._usage = completion["choices"][0], completion.get("usage") or {}
        message = self._choice["message"]
        text, calls = message.get("content"), message.get("tool_calls") or ()
        content: list[Json] = [{"type": "text", "text": text}] if text else []
        for call in calls:
            block = _build_tool_use(call)
            block["input"] = _parse_arguments(call["function"].get("arguments"))
            content.append(block)
        self._has_calls = bool(calls)
        end = {**self._stop, "usage": self._convert_usage()}
        return exact_json.dumps({**self._message, "content": content, **end})

    def start(self) -> bytes:
        return _encode([{"type": "message_start", "message": self._message}])

    def push(self, chunk: Mapping[str, Any]) -> bytes:
        self._usage = chunk.get("usage") or self._usage
        events: list[Json] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if choice.get("finish_reason"):
                self._choice = choice
            if text := delta.get("content"):
                events += self._switch("text", {"type": "text", "text": ""})
                events.append(self._delta({"type": "text_delta", "text": text}))
            for call in delta.get("tool_calls") or ():
                if self._open != call["index"]:
                    self._has_calls = True
                    events += self._switch(call["index"], _build_tool_use(call))
                if arguments := (call.get("function") or {}).get("arguments"):
                    events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return _encode(events)

    def finish(self) -> bytes:
        end = {"type": "message_delta", "delta": self._stop, "usage": self._convert_usage()}
        return _encode([*self._close(), end, {"type": "message_stop"}])

    def fail(self, error: OpenAIErrorFields, status: int) -> bytes:
        return _encode([{**errors.build_document(error["message"], status)}])

    @property
    def _stop(self) -> Json:
        """The stop reason, and the stop sequence that ended the text."""
        reason, stop = self._choice.get("finish_reason"), self._choice.get("stop_reason")
        if self._has_calls and reason != "length":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "stop" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _STOP_REASONS.get(str(reason), "end_turn"), "stop_sequence": None}

    def _convert_usage(self) -> Json:
        prompt, details = self._usage.get("prompt_tokens", 0), self._usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        return {
            "input_tokens": prompt - cached,  # without those that were read from the cache
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._usage.get("completion_tokens", 0),
        }

    def _switch(self, block: str | int, content: Json) -> list[Json]:
        """Open a block unless it is open."""
        if self._open == block:
            return []
        events = self._close()
        self._open = block
        return [*events, {"type": "content_block_start", "index": self._blocks, "content_block": content}]

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        self._open, index = None, self._blocks
        self._blocks += 1
        return [{"type": "content_block_stop", "index": index}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}


def build_chat(given: Mapping[str, Any]) -> Json:
    """Return a chat with the messages, tools and format of a request. Raises InvalidField."""
    for name in _UNSUPPORTED:
        if given.get(name):
            raise InvalidField(f"{name} is not served: leave it out.", name)
    messages: list[Json] = []
    if given.get("system"):
        messages.append({"role": "system", "content": _convert_texts("system", given["system"])})
    turns = given.get("messages")
    if not isinstance(turns, list) or not turns:
        raise InvalidField('messages is a list: [{"role": "user", "content": "Hello"}].', "messages")
    for index, turn in enumerate(turns):
        messages += _convert_turn(f"messages.{index}", turn)
    if messages[-1]["role"] == "assistant":
        raise InvalidField(
            "messages: the last one is of the user; the beginning of an answer is not served.", "messages"
        )
    chat: Json = {"messages": messages}
    if tools := given.get("tools"):
        if not isinstance(tools, list):
            raise InvalidField("tools is a list.", "tools")
        chat["tools"] = [_convert_tool(f"tools.{index}", tool) for index, tool in enumerate(tools)]
    if "tool_choice" in given:
        chat |= _convert_tool_choice(given["tool_choice"])
    if format := _get_format(given.get("output_config")):
        schema = {"name": "output", "schema": format.get("schema")}
        chat["response_format"] = {"type": format.get("type"), "json_schema": schema}
    return chat


def _check_stops(stops: Any) -> list[str]:
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidField("stop_sequences is a list of texts, none of them empty.", "stop_sequences")
    return stops


def _get_format(output_config: Any) -> Mapping[str, Any] | None:
    format = output_config.get("format") if isinstance(output_config, Mapping) else None
    return format if isinstance(format, Mapping) else None


def _convert_turn(place: str, turn: Any) -> list[Json]:
    """Return the messages of a turn: each tool result is one of its own, before the user's text."""
    role = turn.get("role") if isinstance(turn, Mapping) else None
    if role not in _ROLES:
        raise InvalidField(f"{place}.role is one of {', '.join(_ROLES)}.", "messages")
    content = turn.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise InvalidField(f"{place}.content is a text, or a list of blocks.", "messages")
    results: list[Json] = []
    parts: list[Json] = []
    calls: list[Json] = []
    for index, block in enumerate(content):
        block_place = f"{place}.content.{index}"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result" and role == "user":
            results.append(_convert_result(block_place, block))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_convert_call(block_place, block))
        elif kind not in ("thinking", "redacted_thinking"):
            parts.append(_convert_part(block_place, block))
    message: Json = {"role": role, "content": parts}
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if parts or calls or not results else results


def _convert_part(place: str, block: Any) -> Json:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    source = block.get("source") if kind == "image" else None
    if isinstance(source, Mapping):
        is_data = source.get("type") == "base64"
        url = f"data:{source.get('media_type')};base64,{source.get('data')}" if is_data else source.get("url")
        return {"type": "image_url", "image_url": {"url": url}}
    raise InvalidField(f"{place} is of the type {kind!r:.100}, which is not served here.", "messages")


def _convert_texts(place: str, content: Any) -> str:
    """Return the text of a system prompt or of a tool's result."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(f"{place} is a text, or a list of text blocks.", place.partition(".")[0])
    parts = [_convert_part(f"{place}.{index}", block) for index, block in enumerate(content)]
    if any(part["type"] != "text" for part in parts):
        raise InvalidField(f"{place} has a block that is no text.", place.partition(".")[0])
    return "\n".join(part["text"] for part in parts)


def _convert_result(place: str, block: Mapping[str, Any]) -> Json:
    content = _convert_texts(f"{place}.content", block.get("content") or "")
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _convert_call(place: str, block: Mapping[str, Any]) -> Json:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), Mapping):
        raise InvalidField(f"{place} has id, name, and input, which is an object.", "messages")
    arguments = exact_json.dumps(block["input"]).decode()
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _convert_tool(place: str, tool: Any) -> Json:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in ("custom", None):
        raise InvalidField(f"{place} is no tool of the client: others are not served.", "tools")
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _convert_tool_choice(choice: Any) -> Json:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    fields: Json = {"parallel_tool_calls": False} if kind and choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        raise InvalidField(
            'tool_choice.type is "auto", "any", "none", or "tool" with the name of one.', "tool_choice"
        )
    return {**fields, "tool_choice": _TOOL_CHOICES[kind]}


def _build_tool_use(call: Mapping[str, Any]) -> Json:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _parse_arguments(arguments: Any) -> Json:
    """Return the arguments of a call; of a call that max_tokens has ended, there may be none."""
    try:
        parsed = orjson.loads(arguments)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _encode(events: Iterable[Json]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), exact_json.dumps(e)) for e in events)
