"""OpenAI's API for the handler ``llm``: the parser of request bodies.

It implements completions and chat completions of OpenAI's API reference
(platform.openai.com/docs/api-reference). Nothing here generates: ``parse_request`` returns a
``CompletionRequest``, and ``openai_response.py`` builds the response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from handlers import json_text
from handlers.engines.engine import SamplingParams, StructuredOutput
from handlers.engines.request_fields import (
    MAX_COUNT,
    PENALTIES,
    STRUCTURED_OUTPUT_FIELDS,
    parse_logit_bias,
    parse_structured_output,
)
from handlers.engines.tool_calls import ForcedCall, parse_tools
from handlers.errors import PredictionException

MODELS = "v1/models"
COMPLETIONS = "v1/completions"
CHAT = "v1/chat/completions"
TOKENIZE = "tokenize"  # vLLM's

EVENT_STREAM = "text/event-stream"

_MAX_CHOICES = 128  # of one request
_MAX_STOPS = 16
_MAX_OUTPUT = 2**20  # tokens of all choices, each counted once and once for each of its top_logprobs
_MAX_LOGPROBS = {COMPLETIONS: 5, CHAT: 20}  # most likely tokens, reported beside each token

_COMMON_FIELDS = {
    "model",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "n",
    "max_tokens",
    "stream",
    "stream_options",
    "logit_bias",
    *PENALTIES,
    *STRUCTURED_OUTPUT_FIELDS,
}
_FIELDS = {
    COMPLETIONS: _COMMON_FIELDS | {"prompt", "logprobs", "echo"},
    CHAT: _COMMON_FIELDS
    | {"messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice"}
    | {"parallel_tool_calls", "chat_template_kwargs"},
}
_OTHER_FIELDS = {COMPLETIONS: _FIELDS[CHAT] - _FIELDS[COMPLETIONS], CHAT: {"prompt", "echo"}}
# Fields of OpenAI's API without an effect on responses.
_IGNORED_FIELDS = {
    "user",
    "metadata",
    "moderation",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",  # of models that reason
    "safety_identifier",
    "service_tier",
    "store",
}
# Unsupported fields of OpenAI's API and of vLLM's and their values that have no effect; null never has one.
_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": (),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (0,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
# Arguments of transformers' apply_chat_template that are no variables of the template.
_TEMPLATE_ARGUMENTS = {
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed request body.

    A completion has ``prompts`` (texts or token ids), each with ``n`` choices; a chat has ``messages``.
    """

    path: str
    model: str
    sampling: SamplingParams
    stops: tuple[str, ...]
    n: int = 1
    max_new_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    prompt_logprobs: int | None = None  # of the echoed prompts
    prompts: tuple[str | list[int], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    forced_call: ForcedCall | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs
    ignored: tuple[str, ...] = ()  # unknown fields of the request

    @property
    def chat(self) -> bool:
        return self.path == CHAT


def parse_request(
    path: str, row: Mapping[str, Any], default: SamplingParams, take_images: bool = False
) -> CompletionRequest:
    """Parse a row that was sent to ``path``.

    With ``take_images`` the content of each message is a list of ``{"type": "text", "text"}`` and
    ``{"type": "image", "url"}``, else a text. Raises PredictionException, which names the invalid field and
    its valid values.
    """
    if path not in _FIELDS:
        paths = f"{MODELS}, {COMPLETIONS}, {CHAT} and {TOKENIZE}"
        raise PredictionException(f"Unknown API endpoint: {path}. There are {paths}.", 404)
    body = {
        name: value
        for name, value in _parse_body(row).items()
        if value is not None and name not in _IGNORED_FIELDS
    }
    ignored = body.keys() - _FIELDS[path] - _UNSUPPORTED_FIELDS.keys()
    for name, value in body.items():
        if name in _OTHER_FIELDS[path]:
            there_are = ", ".join(sorted(_FIELDS[path]))
            raise PredictionException(f"{name!r} is not known here: there are {there_are}.", 400)
        neutral = _UNSUPPORTED_FIELDS.get(name)
        if (
            neutral is not None
            and value not in neutral
            and not (name == "best_of" and value == body.get("n"))
        ):
            raise PredictionException(f"{name} is not served: leave it out.", 400)
    n = _number(body, "n", int, 1, 1, _MAX_CHOICES)
    parsed = _parse_chat(body, take_images) if path == CHAT else _parse_completion(body)
    logprobs = parsed.pop("logprobs")
    penalties = {
        name: _number(body, name, float, getattr(default, name), *limits)
        for name, limits in PENALTIES.items()
    }
    if n * (1 if path == CHAT else len(parsed["prompts"])) > _MAX_CHOICES:
        raise PredictionException(
            f"n times the prompts is at most {_MAX_CHOICES}: send several requests.", 400
        )
    stream = _flag(body, "stream")
    options = body.get("stream_options", {})
    if not isinstance(options, Mapping) or (options and not stream):
        raise PredictionException('stream_options is an object beside "stream": true.', 400)
    return CompletionRequest(
        path,
        _text(body, "model", ""),
        SamplingParams(
            _number(body, "temperature", float, default.temperature or 1.0, 0, 2),
            _number(body, "top_k", int, default.top_k, 0, MAX_COUNT),
            _number(body, "top_p", float, default.top_p, 0, 1),
            _number(body, "seed", int, default.seed, -(2**63), 2**63 - 1),
            logprobs,
            **penalties,
            logit_bias=parse_logit_bias(body.get("logit_bias")),
            structured_output=_select_output(body, parsed),
        ),
        _parse_stops(body.get("stop")),
        n,
        stream=stream,
        include_usage=_flag(options, "include_usage"),
        ignored=tuple(sorted(ignored)),
        **parsed,
    )


def parse_tokenize(row: Mapping[str, Any], default: SamplingParams) -> CompletionRequest:
    """Parse a row of ``TOKENIZE``: a prompt, or the messages and tools of a chat.

    Raises PredictionException.
    """
    request = parse_request(CHAT if "messages" in _parse_body(row) else COMPLETIONS, row, default)
    if len(request.prompts) > 1:
        raise PredictionException("prompt is one text: send several requests.", 400)
    return request


def check_output_size(request: CompletionRequest, default_new_tokens: int) -> None:
    """Raise PredictionException 400 where the response could have too many tokens and logprobs."""
    choices = request.n * max(1, len(request.prompts))
    new_tokens = default_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    top = (request.sampling.logprobs or 0) + 1
    if choices * new_tokens * top > _MAX_OUTPUT:
        raise PredictionException(
            f"{choices} choices of up to {new_tokens} tokens with {top - 1} logprobs each are more than "
            f"{_MAX_OUTPUT}: lower max_tokens, n or top_logprobs, or send several requests.",
            400,
        )


def check_prompt_logprobs(request: CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Raise PredictionException 400 where the response would have too many logprobs of prompts."""
    if request.prompt_logprobs is None:
        return
    if sum(map(len, prompts)) * (request.prompt_logprobs + 1) > _MAX_OUTPUT:
        raise PredictionException(
            f"{len(prompts)} prompts with {request.prompt_logprobs} logprobs of each token are more than "
            f"{_MAX_OUTPUT}: send several requests.",
            400,
        )


def _parse_completion(body: Mapping[str, Any]) -> dict[str, Any]:
    logprobs = _number(body, "logprobs", int, None, 0, _MAX_LOGPROBS[COMPLETIONS])
    echo = _flag(body, "echo")
    with_prompt = echo and logprobs is not None
    if with_prompt and body.get("n", 1) != 1:
        raise PredictionException("echo together with logprobs goes with n: 1.", 400)
    return {
        "prompts": _parse_prompts(body.get("prompt")),
        "max_new_tokens": _number(body, "max_tokens", int, None, 0 if with_prompt else 1, MAX_COUNT),
        "prompt_logprobs": logprobs if with_prompt else None,
        "logprobs": logprobs,
        "echo": echo,
    }


def _parse_chat(body: Mapping[str, Any], take_images: bool) -> dict[str, Any]:
    if "max_tokens" in body and "max_completion_tokens" in body:
        raise PredictionException(
            "max_completion_tokens is the new name of max_tokens: give one of them.", 400
        )
    limit_field = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
    top_logprobs = _number(body, "top_logprobs", int, None, 0, _MAX_LOGPROBS[CHAT])
    with_logprobs = _flag(body, "logprobs")
    if top_logprobs is not None and not with_logprobs:
        raise PredictionException('top_logprobs goes with "logprobs": true.', 400)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise PredictionException('messages is a list: [{"role": "user", "content": "Hello"}].', 400)
    tools, forced_call = parse_tools(
        body, "parallel_tool_calls" not in body or _flag(body, "parallel_tool_calls")
    )
    return {
        "messages": tuple(
            _parse_message(index, message, take_images) for index, message in enumerate(messages)
        ),
        "max_new_tokens": _number(body, limit_field, int, None, 1, MAX_COUNT),
        "logprobs": (top_logprobs or 0) if with_logprobs else None,
        "tools": tools,
        "forced_call": forced_call,
        "template_variables": _parse_template_variables(body.get("chat_template_kwargs")),
    }


def _parse_template_variables(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PredictionException("chat_template_kwargs is an object of the template's variables.", 400)
    if reserved := sorted(_TEMPLATE_ARGUMENTS & value.keys()):
        raise PredictionException(f"chat_template_kwargs may not have {', '.join(reserved)}.", 400)
    return dict(value)


def _select_output(body: Mapping[str, Any], parsed: Mapping[str, Any]) -> StructuredOutput | None:
    """Return the format of the text: the requested one, or that of the forced tool call."""
    output = parse_structured_output(body)
    if output is None:
        forced_call = parsed.get("forced_call")
        return None if forced_call is None else forced_call.output
    if parsed.get("tools"):
        raise PredictionException(
            f'{output.field_name} together with tools is not served: set "tool_choice": "none".', 400
        )
    return output


def _parse_message(index: int, message: Any, take_images: bool) -> dict[str, Any]:
    """Convert a message to the form of chat templates: its content, and tool arguments as objects."""
    where = f"messages[{index}]"
    role = _ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None
    if role is None:
        raise PredictionException(
            f"{where} has a role, which is one of {', '.join(_ROLES)}, and content.", 400
        )
    content = message.get("content")
    if isinstance(content, list) and take_images:
        content = [_parse_part(where, part) for part in content]
    elif isinstance(content, list):
        content = "".join(_parse_text_part(where, part) for part in content)
    if not isinstance(content, str if not take_images else (str, list)) and not (
        content is None and role == "assistant"
    ):
        raise PredictionException(f"{where}.content is a text, or a list of parts of type text.", 400)
    if take_images and not isinstance(content, list):
        content = [{"type": "text", "text": content or ""}]
    parsed = {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    parsed |= {"role": role, "content": content or ""}
    if message.get("tool_calls"):
        try:
            parsed["tool_calls"] = [
                {
                    **call,
                    "function": {**call["function"], "arguments": _parse_arguments(call["function"])},
                }
                for call in message["tool_calls"]
            ]
        except (TypeError, KeyError, ValueError):
            raise PredictionException(
                f"{where}.tool_calls are not such as a model's answer has.", 400
            ) from None
    return parsed


def _parse_arguments(function: Mapping[str, Any]) -> Any:
    """Return the arguments of an earlier call; some clients send "" or nothing for none, or an object."""
    arguments = function.get("arguments") or "{}"
    return arguments if isinstance(arguments, Mapping) else json_text.loads(arguments)


def _parse_part(where: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "image_url":
        if kind != "text":
            raise PredictionException(
                f"{where}.content has a part of type {kind!r:.100}; there are text and image_url.", 400
            )
        return {"type": "text", "text": _parse_text_part(where, part)}
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str):
        raise PredictionException(
            f'{where}.content has an image without its URL: send "image_url": {{"url": "data:..."}}.', 400
        )
    return {"type": "image", "url": url}


def _parse_text_part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise PredictionException(
            f"{where}.content has a part of type {kind!r:.100}, and this model reads texts only.", 400
        )
    return text


def _parse_body(row: Mapping[str, Any]) -> Mapping[str, Any]:
    body = row.get("body", row.get("data"))
    if isinstance(body, (str, bytes, bytearray, memoryview)):
        try:
            body = json_text.loads(body if isinstance(body, str) else bytes(body))
        except ValueError as error:
            raise PredictionException(f"The body is no JSON: {error}.", 400) from None
    if not isinstance(body, Mapping):
        raise PredictionException("The body is a JSON object.", 400)
    return body


def _parse_prompts(value: Any) -> tuple[str | list[int], ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(type(token) is int for token in value):
            return (value,)
        if all(isinstance(prompt, str) for prompt in value):
            return tuple(value)
        if all(isinstance(ids, list) and ids and all(type(token) is int for token in ids) for ids in value):
            return tuple(value)
    raise PredictionException(
        "prompt is a text, a list of texts, a list of token ids, or a list of such lists.", 400
    )


def _parse_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if (
        isinstance(stops, list)
        and len(stops) <= _MAX_STOPS
        and all(isinstance(stop, str) and stop for stop in stops)
    ):
        return tuple(stops)
    raise PredictionException(
        f"stop is a text, or a list of up to {_MAX_STOPS} texts, none of them empty.", 400
    )


def _number(
    body: Mapping[str, Any],
    field: str,
    kind: Callable[[Any], Any],
    default: Any,
    minimum: float,
    maximum: float,
) -> Any:
    value = body.get(field)
    if value is None:
        return default
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and minimum <= value <= maximum
    if not valid or (kind is int and value != value // 1):
        expected = "a whole number" if kind is int else "a number"
        raise PredictionException(
            f"{field} is {value!r:.100}; it is {expected} from {minimum} to {maximum}.", 400
        )
    return kind(value)


def _flag(body: Mapping[str, Any], field: str) -> bool:
    value = body.get(field, False)
    if not isinstance(value, bool):
        raise PredictionException(f"{field} is {value!r:.100}; it is true or false.", 400)
    return value


def _text(body: Mapping[str, Any], field: str, default: str) -> str:
    value = body.get(field, default)
    if not isinstance(value, str):
        raise PredictionException(f"{field} is {value!r:.100}; it is a text.", 400)
    return value
