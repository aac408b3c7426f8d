"""TorchServe's built-in handler ``trt_llm_handler``, on the handler ``llm``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from handlers.builtin.llm_request import parse_request
from handlers.builtin.vertex_instance import VertexInstance, find_instance
from handlers.errors import PredictionException
from handlers.torchserve_compat.language_model import TranslatedLanguageModel, read_body

_DEFAULT_TOKENS = 32  # of TensorRT-LLM's SamplingParams
_RENAMED = {"streaming": "stream", "random_seed": "seed"}
_IGNORED = ("end_id", "pad_id")  # the tokenizer has them


class TRTLLMHandler(TranslatedLanguageModel):
    """The handler ``llm`` with the configuration and the requests of TorchServe's ``trt_llm_handler``.

    A body is ``{"prompt", "max_tokens" or "max_new_tokens", "temperature", ..., "streaming"}``. The response
    is the text; with ``streaming``, chunks ``{"text"}`` and an empty last one. With the header ``url_path``,
    a body is one of OpenAI's API.
    """

    handler_name = "trt_llm_handler"

    async def handle(self, data: list[Any], context: Any) -> list[Any]:
        return await self.postprocess(await self.inference(await self.preprocess(data), context))

    async def preprocess(self, requests: list[Any]) -> list[Any]:
        """Return the bodies of the requests."""
        return [request.get("data") or request.get("body") for request in requests]

    async def inference(self, data: list[Any], context: Any) -> list[Any]:
        """Return the responses to bodies."""
        return await super().handle([{"body": body} for body in data], context)

    async def postprocess(self, outputs: list[Any]) -> list[Any]:
        return outputs

    async def _answer_row(self, index: int, row: Any, context: Any) -> Any:
        if context.get_request_header(index, "url_path"):
            return await super()._answer_row(index, row, context)
        try:
            body = read_body(row["body"])
            if find_instance({"body": body}) is not None:
                return await super()._answer_row(index, {"body": body}, context)
            return await self._answer_prompt(index, body, context)
        except PredictionException as error:
            return error

    async def _answer_instance(self, index: int, instance: VertexInstance, context: Any) -> Any:
        if not instance.is_chat:
            instance = instance._replace(body=_complete_fields(instance.body))
        return await super()._answer_instance(index, instance, context)

    async def _answer_prompt(self, index: int, body: Any, context: Any) -> str:
        if not isinstance(body, Mapping):
            body = {"prompt": body}
        parsed = parse_request({"body": _complete_fields(body)}, self.default_sampling)
        if not parsed.stream:
            return (await self._generate(index, parsed, context)).text

        def send(text: str) -> None:
            context.emit(index, json.dumps({"text": text}))

        result = await self._generate(index, parsed, context, lambda text, _: send(text))
        if result.rest:
            send(result.rest)
        return ""


def _complete_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the handler ``llm``, with TensorRT-LLM's default number of tokens."""
    if isinstance(nested := body.get("parameters"), Mapping):
        body = {**nested, **{key: value for key, value in body.items() if key != "parameters"}}
    fields = {_RENAMED.get(key, key): value for key, value in body.items() if key not in _IGNORED}
    if "max_tokens" not in fields and "max_new_tokens" not in fields:
        fields["max_tokens"] = _DEFAULT_TOKENS
    return fields
