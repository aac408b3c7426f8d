"""The instances of Vertex AI's containers of vLLM: prompts with ``raw_response``, and chats.

``"@requestFormat": "chatCompletions"`` makes an instance a body of OpenAI's chats. An instance with a prompt
has its parameters beside it; with ``raw_response`` the prediction is the text alone, else prompt and text. A
body with ``messages`` is a chat on each route of predictions, as in SageMaker's containers of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from handlers import json_text
from handlers.errors import PredictionException

FORMAT, CHAT, RAW = "@requestFormat", "chatCompletions", "raw_response"
_MESSAGES = "messages"


class VertexInstance(NamedTuple):
    """An instance: a chat, or a prompt whose prediction is a text; ``body`` has the other fields."""

    is_chat: bool
    is_raw: bool
    body: dict[str, Any]

    def format(self, prompt: str, text: str) -> str:
        """Return the prediction of a prompt."""
        return text if self.is_raw else f"Prompt:\n{prompt.strip()}\nOutput:\n{text}"


def is_chat(instance: Any) -> bool:
    """Return whether an instance is a chat. Raises PredictionException for an unknown format."""
    if not isinstance(instance, Mapping):
        return False
    name = instance.get(FORMAT)
    if name not in (None, CHAT):
        raise PredictionException(f"{FORMAT} is {name!r:.100}; it is {CHAT}, or absent for a prompt.", 400)
    return name is not None or _MESSAGES in instance


def merge(instance: Any, parameters: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return an instance with the parameters of all instances; its own fields take precedence."""
    own = dict(instance) if isinstance(instance, Mapping) else {"prompt": instance}
    if is_chat(own):
        return {**{key: value for key, value in parameters.items() if key != RAW}, **own}
    nested = own.pop("parameters", None)
    if nested is not None and not isinstance(nested, Mapping):
        raise PredictionException('parameters is an object, such as {"temperature": 0.7}.', 400)
    if twice := sorted((nested or {}).keys() & own.keys()):
        raise PredictionException(f"{twice[0]} is given twice (also in parameters): give it once.", 400)
    return {**defaults, **parameters, **(nested or {}), **own}


def find_instance(row: Any) -> VertexInstance | None:
    """Return the instance in a row; None where it has a handler's own format. Raises PredictionException."""
    body = row.get("body", row.get("data")) if isinstance(row, Mapping) else None
    if isinstance(body, (bytes, bytearray)) and f'"{_MESSAGES}"'.encode() in body:
        try:
            body = json_text.loads(body)
        except ValueError:  # the handler's to report
            return None
    if not isinstance(body, Mapping) or body.keys().isdisjoint((FORMAT, RAW, _MESSAGES)):
        return None
    rest = {key: value for key, value in body.items() if key not in (FORMAT, RAW)}
    raw = body.get(RAW, False)
    if not isinstance(raw, bool):
        raise PredictionException(f"{RAW} is {raw!r:.100}; it is true or false.", 400)
    return VertexInstance(is_chat(body), raw, rest)
