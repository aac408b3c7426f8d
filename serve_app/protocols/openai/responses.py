"""OpenAI's Responses API as chat completions: the translation of a request, its response and its events.

Source: platform.openai.com/docs/api-reference/responses. Nothing is stored, so a request has its whole
conversation in ``input``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from typing_extensions import TypedDict

from serve_app.domain import exact_json
from serve_app.domain.validation import documented
from serve_app.protocols.openai.errors import InvalidField, OpenAIErrorFields
from serve_app.protocols.openai.fields import find_ignored

Json = dict[str, Any]

_LOGPROBS = "message.output_text.logprobs"  # of ``include``
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")  # the second of models that reason
_TEXT_PARTS = ("input_text", "output_text", "text")
_FORWARDED = (
    *("temperature", "top_p", "parallel_tool_calls"),
    # vLLM's additions
    *("top_k", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("structured_outputs", "chat_template_kwargs"),
)
_KEEPS_NOTHING = "this server keeps no responses"
# Unsupported fields: the values that have no effect, and the remedy.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "leave it out"),
    "context_management": (([],), "leave it out"),
    "conversation": ((), f"{_KEEPS_NOTHING}; send the earlier items in input"),
    "previous_response_id": ((), f"{_KEEPS_NOTHING}; send the earlier items in input"),
    "prompt": ((), "send the text in input and instructions"),
    "store": ((False,), f"{_KEEPS_NOTHING}; leave it out, or set it to false"),
    "truncation": (("disabled",), "shorten input instead"),
}


class ResponsesBody(TypedDict, total=False):
    """A request. Fields of vLLM are served too: top_k, seed, stop, penalties, logit_bias."""

    model: Annotated[str, documented("name, name:version, name:adapter or name:version:adapter")]
    input: str | list[Any]
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    stream: bool | None
    text: Annotated[Json | None, documented("The format: text, json_object or json_schema.")]
    tools: list[Any] | None
    tool_choice: Any
    parallel_tool_calls: bool | None
    top_logprobs: int | None
    include: list[str] | None
    metadata: Json | None


_WITHOUT_EFFECT = (
    "max_tool_calls",  # of tools that the server would call
    *("metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("reasoning", "safety_identifier", "service_tier", "stream_options", "user"),
)
_KNOWN = {*ResponsesBody.__annotations__, *_WITHOUT_EFFECT, *_FORWARDED, *_UNSUPPORTED}


class ResponsesTranslation:
    """A request, which becomes ``chat``, and the state of its response. Raises InvalidField."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        given = {name: value for name, value in body.items() if value is not None}
        for name, (neutral, remedy) in _UNSUPPORTED.items():
            if name in given and given[name] not in neutral:
                raise InvalidField(f"{name} is not served: {remedy}.", name)
        self.ignored = find_ignored(body, _KNOWN)
        self.stream = given.get("stream", False)
        if not isinstance(self.stream, bool):
            raise InvalidField("stream is true or false.", "stream")
        self.chat = _build_chat(given)
        if self.stream:
            self.chat["stream_options"] = {"include_usage": True}
        self._response = _build_frame(given)
        self._output = _OutputItems()
        self._usage: Mapping[str, Any] | None = None
        self._finish_reason: str | None = None
        self._sequence = 0

    def encode(self, completion: Mapping[str, Any]) -> bytes:
        """Return the response of a whole chat completion."""
        choice = completion["choices"][0]
        message = choice["message"]
        self._usage, self._finish_reason = completion.get("usage"), choice.get("finish_reason")
        text, calls = message.get("content") or "", message.get("tool_calls") or ()
        if text or not calls:
            self._output.add_text(text, _get_logprobs(choice))
        for index, call in enumerate(calls):
            self._output.add_call(index, call)
        self._output.close(self._status)
        return exact_json.dumps(self._complete())

    def start(self) -> bytes:
        response = {**self._response, "status": "in_progress", "output": [], "usage": None}
        return self._encode(
            [{"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress")]
        )

    def push(self, chunk: Mapping[str, Any]) -> bytes:
        self._usage = chunk.get("usage") or self._usage
        events: list[Json] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if text := delta.get("content"):
                events += self._output.add_text(text, _get_logprobs(choice))
            for call in delta.get("tool_calls") or ():
                events += self._output.add_call(call["index"], call)
        return self._encode(events)

    def finish(self) -> bytes:
        events = [] if self._output.items else self._output.add_text("", [])
        events += self._output.close(self._status)
        return self._encode([*events, {"type": f"response.{self._status}", "response": self._complete()}])

    def fail(self, error: OpenAIErrorFields, status: int) -> bytes:
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        response = {
            **self._complete(),
            "status": "failed",
            "error": {"code": code, "message": error["message"]},
            "incomplete_details": None,
        }
        return self._encode([{"type": "response.failed", "response": response}])

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason in ("length", "content_filter") else "completed"

    def _complete(self) -> Json:
        """Return the response with its output."""
        reason = "content_filter" if self._finish_reason == "content_filter" else "max_output_tokens"
        return {
            **self._response,
            "status": self._status,
            "incomplete_details": {"reason": reason} if self._status == "incomplete" else None,
            "output": self._output.items,
            "usage": _convert_usage(self._usage),
        }

    def _encode(self, events: Iterable[Json]) -> bytes:
        encoded = b""
        for event in events:
            document = exact_json.dumps({**event, "sequence_number": self._sequence})
            encoded += b"event: %b\ndata: %b\n\n" % (event["type"].encode(), document)
            self._sequence += 1
        return encoded


class _OutputItems:
    """The items of an output, of which the last is open; each method returns the events of its change."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._open: Json | None = None
        self._call_index: int | None = None  # of the open item, in the chat's message

    def add_text(self, text: str, logprobs: list[Json]) -> list[Json]:
        events = []
        if self._open is None or self._open["type"] != "message":
            events += self.close("completed")
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events += self._begin("message", role="assistant", content=[])
            events.append(self._event("content_part.added", content_index=0, part=part))
            self._item["content"].append(dict(part, logprobs=[]))
        content = self._item["content"][0]
        content["text"] += text
        content["logprobs"] += logprobs
        if text:
            delta = self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
            events.append(delta)
        return events

    def add_call(self, index: int, call: Mapping[str, Any]) -> list[Json]:
        """Add a tool call, or the next part of its arguments."""
        function = call.get("function") or {}
        events = []
        if self._open is None or self._call_index != index:
            events += self.close("completed")
            events += self._begin("function_call", call_id=call["id"], name=function["name"], arguments="")
            self._call_index = index
        if arguments := function.get("arguments"):
            self._item["arguments"] += arguments
            events.append(self._event("function_call_arguments.delta", delta=arguments))
        return events

    def close(self, status: str) -> list[Json]:
        """End the open item, if there is one."""
        if self._open is None:
            return []
        item = self._item
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            text, logprobs = part["text"], part["logprobs"]
            events = [
                self._event("output_text.done", content_index=0, text=text, logprobs=logprobs),
                self._event("content_part.done", content_index=0, part=part),
            ]
        else:
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("function_call_arguments.done", **fields)]
        events.append(self._item_event("output_item.done"))
        self._open = self._call_index = None
        return events

    @property
    def _item(self) -> Json:
        assert self._open is not None
        return self._open

    def _begin(self, kind: str, **fields: Any) -> list[Json]:
        prefix = "msg" if kind == "message" else "fc"
        self._open = {"id": _create_id(prefix), "type": kind, "status": "in_progress", **fields}
        self.items.append(self._open)
        return [self._item_event("output_item.added")]

    def _item_event(self, kind: str) -> Json:
        item = dict(self._item)
        if "content" in item:
            item["content"] = list(item["content"])
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **fields: Any) -> Json:
        place = {"item_id": self._item["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **fields}


def _build_frame(given: Mapping[str, Any]) -> Json:
    """Return the response without its output."""
    return {
        "id": _create_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": given.get("model"),
        "error": None,
        "incomplete_details": None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": given.get("temperature"),
        "text": {"format": {"type": "text"}, **given.get("text", {})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_p": given.get("top_p"),
        "truncation": "disabled",
    }


def _build_chat(given: Mapping[str, Any]) -> Json:
    """Return the body of the chat completion."""
    instructions = given.get("instructions", "")
    if not isinstance(instructions, str):
        raise InvalidField("instructions is a text.", "instructions")
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    chat: Json = {"messages": messages + _convert_input(given.get("input"))}
    chat |= {name: given[name] for name in _FORWARDED if name in given}
    if "max_output_tokens" in given:
        chat["max_completion_tokens"] = given["max_output_tokens"]
    if "tools" in given:
        chat["tools"] = _convert_list(given, "tools", _convert_tool)
    if "tool_choice" in given:
        chat["tool_choice"] = _convert_tool_choice(given["tool_choice"])
    if "text" in given:
        chat |= _convert_text(given["text"])
    include = _convert_list(given, "include", lambda place, name: name)
    if unknown := [name for name in include if name not in _INCLUDABLE]:
        raise InvalidField(f"include has {unknown[0]!r:.100}; there are {', '.join(_INCLUDABLE)}.", "include")
    if _LOGPROBS in include or given.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
    return chat


def _convert_input(value: Any) -> list[Json]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidField("input is a text, or a list of items that is not empty.", "input")
    messages: list[Json] = []
    for index, item in enumerate(value):
        place = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise InvalidField(f"{place} is an object.", "input")
        kind = item.get("type", "message")
        if kind == "message":
            content = _convert_content(f"{place}.content", item.get("content"))
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_convert_call(place, item))
        elif kind == "function_call_output":
            content = _convert_content(f"{place}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":  # of another model
            raise InvalidField(
                f"{place} is of the type {kind!r:.100}; there are message, function_call, "
                "function_call_output and reasoning.",
                "input",
            )
    return messages


def _convert_content(place: str, content: Any) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(f"{place} is a text, or a list of parts.", "input")
    return [_convert_part(f"{place}[{index}]", part) for index, part in enumerate(content)]


def _convert_part(place: str, part: Any) -> Json:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS or kind == "refusal":
        return {"type": "text", "text": part.get("refusal" if kind == "refusal" else "text")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise InvalidField(
        f"{place} is of the type {kind!r:.100}; there are input_text, output_text, refusal, and input_image "
        "with image_url.",
        "input",
    )


def _convert_call(place: str, item: Mapping[str, Any]) -> Json:
    if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
        raise InvalidField(f"{place} has call_id, name and arguments, which are texts.", "input")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _convert_tool(place: str, tool: Any) -> Json:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidField(f'{place} is no tool of the type "function": others are not served.', "tools")
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _convert_tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise InvalidField(
        'tool_choice is "none", "auto", "required" or {"type": "function", "name": ...}.', "tool_choice"
    )


def _convert_text(text: Any) -> Json:
    """Return the fields of a chat for ``text``: the format and the verbosity."""
    if not isinstance(text, Mapping):
        raise InvalidField('text is an object: {"format": {"type": "text"}}.', "text")
    fields = {"verbosity": text["verbosity"]} if text.get("verbosity") is not None else {}
    format = text.get("format")
    if format is None:
        return fields
    if isinstance(format, Mapping) and format.get("type") == "json_schema":
        schema = {name: value for name, value in format.items() if name != "type"}
        return {**fields, "response_format": {"type": "json_schema", "json_schema": schema}}
    return {**fields, "response_format": format}


def _convert_list(given: Mapping[str, Any], field: str, convert: Callable[[str, Any], Any]) -> list[Any]:
    items = given.get(field, [])
    if not isinstance(items, list):
        raise InvalidField(f"{field} is a list.", field)
    return [convert(f"{field}[{index}]", item) for index, item in enumerate(items)]


def _convert_usage(usage: Mapping[str, Any] | None) -> Json | None:
    if usage is None:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _get_logprobs(choice: Mapping[str, Any]) -> list[Json]:
    entries: Sequence[Json] = (choice.get("logprobs") or {}).get("content") or ()
    return list(entries)


def _create_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
