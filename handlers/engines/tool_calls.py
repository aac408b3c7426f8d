"""Tool calls of chat completions: parsed from the text, or forced by the schemas of the tools.

A forced call needs no format of the model: its text is the JSON of the arguments (one named tool), or of a
list of calls, as in vLLM.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlers import json_text
from handlers.engines.engine import StructuredOutput
from handlers.errors import PredictionException

# The format of Hermes and Qwen, for tokenizers of it without transformers' response_template.
_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"
_OTHER_FORMAT = "<function="  # Qwen 3.5 has these inside of the same tags, and no JSON
_HERMES_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": _HERMES_CLOSE,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


@dataclass(frozen=True)
class ForcedCall:
    """A call that the output consists of: of the tool ``name``, or of any tools where it is None."""

    name: str | None
    output: StructuredOutput


def parse_tools(
    body: Mapping[str, Any], parallel: bool = True
) -> tuple[tuple[dict[str, Any], ...], ForcedCall | None]:
    """Return the tools of a chat and the call that ``tool_choice`` forces.

    Without ``parallel``, a forced list has one call. Raises PredictionException 400.
    """
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PredictionException("tools is a list of objects.", 400)
    schemas = {}
    for index, tool in enumerate(tools):
        name, schema = _parse_tool(index, tool)
        schemas[name] = schema
    if choice == "none":
        return (), None
    if choice == "auto":
        return tuple(tools), None
    if choice == "required" and schemas:
        return tuple(tools), ForcedCall(None, _require_calls(schemas, None if parallel else 1))
    function = choice.get("function") if isinstance(choice, Mapping) else None
    chosen = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(chosen, str) or chosen not in schemas:
        raise PredictionException(
            'tool_choice is "none", "auto", "required" (with tools), or the function of one of the tools: '
            '{"type": "function", "function": {"name": ...}}.',
            400,
        )
    output = StructuredOutput("json", json.dumps(schemas[chosen]), f"tools: parameters of {chosen}")
    return tuple(tools), ForcedCall(chosen, output)


def find_format(tokenizer: Any) -> dict[str, Any] | None:
    """Return the response template by which the calls in a model's text are parsed, or None."""
    template = getattr(tokenizer, "response_template", None)
    if template is None and isinstance(tokenizer.chat_template, str):
        chat_template = tokenizer.chat_template
        if _HERMES_OPEN in chat_template and _OTHER_FORMAT not in chat_template:
            return _HERMES_TEMPLATE
    return template


def parse_text(
    tokenizer: Any, prompt: Sequence[int], output: str | list[int], tools: Sequence[dict[str, Any]]
) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text and the calls of an output; the text is None where a call is malformed."""
    template = find_format(tokenizer)
    # The prompt has the beginning of the message, which Hermes' format does not need.
    prefix = "" if template is _HERMES_TEMPLATE else list(prompt)
    try:
        message = tokenizer.parse_response(output, template, prefix=prefix, tools=list(tools))
        calls = [_build_call(call["function"]) for call in message.get("tool_calls") or ()]
        return message.get("content") or "", calls
    except (ValueError, KeyError, TypeError):
        return None, []


def parse_forced(text: str, forced: ForcedCall) -> list[dict[str, Any]]:
    """Return the calls of a forced output; the arguments of a named tool may be incomplete."""
    if forced.name is not None:
        return [_build_call({"name": forced.name, "arguments": text})]
    try:
        calls = json_text.loads(text)
        return [_build_call({"name": call["name"], "arguments": call["parameters"]}) for call in calls]
    except ValueError:  # max_tokens or a stop string has ended it
        return []


def _build_call(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _parse_tool(index: int, tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    parameters = (function.get("parameters") if isinstance(function, Mapping) else None) or {}
    if not isinstance(name, str) or not name or not isinstance(parameters, dict):
        raise PredictionException(
            f'tools[{index}] is {{"type": "function", "function": {{"name": ..., "parameters": {{...}}}}}}, '
            "with a JSON Schema of the parameters.",
            400,
        )
    return name, {"type": "object", **parameters}


def _require_calls(schemas: Mapping[str, dict[str, Any]], max_calls: int | None) -> StructuredOutput:
    """Return the schema of a list of calls. Definitions move to its root, where references point to."""
    root: dict[str, Any] = {"type": "array", "minItems": 1}
    if max_calls is not None:
        root["maxItems"] = max_calls
    calls = []
    for name, schema in schemas.items():
        own = dict(schema)
        for key in ("$defs", "definitions"):
            for definition, value in (own.pop(key, None) or {}).items():
                if root.setdefault(key, {}).setdefault(definition, value) != value:
                    raise PredictionException(
                        f"tools: {key} of {name} has another {definition!r} than a tool before: rename it.",
                        400,
                    )
        call = {"name": {"const": name}, "parameters": own}
        required = list(call)
        calls.append(
            {"type": "object", "properties": call, "required": required, "additionalProperties": False}
        )
    root["items"] = {"anyOf": calls}
    return StructuredOutput("json", json.dumps(root), "tools")
