"""TorchServe's built-in handler ``vllm_handler``, on the handler ``llm``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from handlers.builtin.llm_request import parse_request
from handlers.builtin.vertex_instance import RAW, VertexInstance, find_instance
from handlers.engines import openai
from handlers.engines.engine import Logprob
from handlers.errors import PredictionException
from handlers.torchserve_compat.language_model import TranslatedLanguageModel, read_body

# The defaults of vLLM's SamplingParams.
_DEFAULTS = {"max_tokens": 16, "temperature": 1.0}


class VLLMHandler(TranslatedLanguageModel):
    """The handler ``llm`` with the configuration and the requests of TorchServe's ``vllm_handler``.

    A request with the header ``url_path`` has a body of OpenAI's API, as in TorchServe 0.12. Without it, a
    body is ``{"prompt", "max_tokens" or "max_new_tokens", "temperature", ..., "lora_adapter"}``, and the
    response a stream of ``{"text", "tokens"}``, as in TorchServe 0.11; ``tokens`` is the last token's id.
    """

    handler_name = "vllm_handler"
    instance_defaults: ClassVar[Mapping[str, Any]] = {RAW: False}  # the predictions are texts

    def __init__(self) -> None:
        super().__init__()
        self.served_names: tuple[str, ...] = ()
        self.adapter_names: tuple[str, ...] = ()

    async def initialize(self, ctx: Any) -> None:
        await super().initialize(ctx)
        config = ctx.model_yaml_config.get("handler") or {}
        if (template := config.get("chat_template")) is not None:
            directory = Path(ctx.system_properties["model_dir"])
            self.tokenizer.chat_template = _read_template(str(template), directory)
        names = (config.get("vllm_engine_config") or {}).get("served_model_name") or ()
        self.served_names = (names,) if isinstance(names, str) else tuple(names)
        self.adapter_names = tuple(config.get("adapters") or ())

    async def handle(self, data: list[Any], context: Any) -> list[Any]:
        outputs = await self.inference(await self.preprocess(data, context), context)
        return await self.postprocess(outputs)

    async def preprocess(self, requests: list[Any], context: Any) -> list[Any]:
        """Return the bodies of the requests."""
        return [request.get("data") or request.get("body") for request in requests]

    async def inference(self, input_batch: list[Any], context: Any) -> list[Any]:
        """Return the responses to bodies."""
        return await super().handle([{"body": body} for body in input_batch], context)

    async def postprocess(self, inference_outputs: list[Any]) -> list[Any]:
        return inference_outputs

    async def _answer_row(self, index: int, row: Any, context: Any) -> Any:
        path = context.get_request_header(index, "url_path")
        if path == openai.MODELS and (self.served_names or self.adapter_names):
            return self._list_models(context.model_name)
        try:
            body = read_body(row["body"])
            if not path and find_instance({"body": body}) is not None:
                return await super()._answer_row(index, {"body": body}, context)
            if path:
                return await super()._answer_row(index, {"body": self._select_model(body, context)}, context)
            return await self._answer_tokens(index, body, context)
        except PredictionException as error:
            return error

    async def _answer_instance(self, index: int, instance: VertexInstance, context: Any) -> Any:
        body = (
            self._select_model(instance.body, context)
            if instance.is_chat
            else _complete_fields(instance.body)
        )
        return await super()._answer_instance(index, instance._replace(body=body), context)

    def _list_models(self, model: str) -> dict[str, Any]:
        names = (*(self.served_names or (model,)), *self.adapter_names)
        entries = [{"id": name, "object": "model", "created": 0, "owned_by": "vllm"} for name in names]
        return {"object": "list", "data": entries}

    def _select_model(self, body: Any, context: Any) -> Any:
        """Return an OpenAI body whose adapter, in TorchServe its ``model``, is named as ``llm`` names it."""
        if isinstance(body, Mapping) and body.get("model") in self.adapter_names:
            return {**body, "model": f"{context.model_name}:{body['model']}"}
        return body

    async def _answer_tokens(self, index: int, body: Any, context: Any) -> Any:
        """Stream one object per chunk of tokens; return the last one."""
        if not isinstance(body, Mapping):
            body = {"prompt": body}
        parsed = parse_request({"body": _complete_fields(body)}, self.default_sampling)
        # The log-probabilities carry the ids of a chunk's tokens.
        parsed = dataclasses.replace(parsed, sampling=dataclasses.replace(parsed.sampling, logprobs=0))

        def send(text: str, logprobs: Sequence[Logprob]) -> None:
            context.emit(index, _token_event(text, logprobs))

        result = await self._generate(index, parsed, context, send)
        return _token_event(result.rest, result.logprobs)


def _complete_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the handler ``llm``, with vLLM's defaults."""
    fields = {key: value for key, value in body.items() if key not in ("lora_adapter", "logprobs")}
    for key, value in _DEFAULTS.items():
        if key not in fields and not (key == "max_tokens" and "max_new_tokens" in fields):
            fields[key] = value
    if body.get("lora_adapter"):
        fields["adapter"] = body["lora_adapter"]
    return fields


def _read_template(template: str, directory: Path) -> str:
    """Return a chat template, which is a text or a file of the archive."""
    if len(template) < 256 and "{" not in template and (directory / template).is_file():
        return (directory / template).read_text()
    return template


def _token_event(text: str, logprobs: Sequence[Logprob]) -> str:
    return json.dumps({"text": text, "tokens": logprobs[-1].token if logprobs else None})
