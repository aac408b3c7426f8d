"""The base of TorchServe's handlers of language models: ``llm`` with a translated configuration."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import logging
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from handlers import json_text
from handlers.builtin.llm import LanguageModel
from handlers.engines.engine import GenerationChunk, GenerationRequest, validate_request
from handlers.errors import HandlerLoadError, PredictionException
from handlers.torchserve_compat import llm_config
from handlers.torchserve_compat.model_folder import find_local_folder, open_model_folder

logger = logging.getLogger(__name__)


class TranslatedLanguageModel(LanguageModel):
    """The handler ``llm`` of an archive whose model-config.yaml is that of TorchServe's ``handler_name``."""

    handler_name = ""

    def __init__(self) -> None:
        super().__init__()
        self.initialized = False
        self.model_dir: str | None = None

    async def initialize(self, ctx: Any) -> None:
        """Load the model that ``handler`` in model-config.yaml names."""
        directory = Path(ctx.system_properties["model_dir"])
        self.model_dir = str(directory)
        config = ctx.model_yaml_config
        options = (config.get("handler") or {}).get("vllm_engine_config") or {}
        translated = self._translate(config, directory)
        runs_code = bool(ctx.manifest) or config.get("trusted") is True
        folder = open_model_folder(directory, translated.model_path, options, runs_code)
        derived = copy.copy(ctx)
        derived.model_yaml_config = {
            **translated.config,
            "engine": _complete_engine(translated.config["engine"], directory),
        }
        derived.manifest, derived.system_properties = _point_to_folder(ctx, folder)
        await super().initialize(derived)
        limit = options.get("max_model_len")
        if limit is not None and self.engine is not None and self.engine.capacity > limit:
            self.engine = BoundedEngine(self.engine, limit)
        self.initialized = True

    def _translate(self, config: Mapping[str, Any], directory: Path) -> llm_config.TranslatedModelConfig:
        own = config.get("engine")
        name = own.get("name") if isinstance(own, Mapping) else None
        has_vllm = name == "vllm" if name else importlib.util.find_spec("vllm") is not None
        translated = llm_config.translate(self.handler_name, config, directory, has_vllm)
        if own is None:  # else the registration has logged them
            for warning in translated.warnings:
                logger.warning("model-config.yaml: %s", warning)
        return translated


class BoundedEngine:
    """An engine whose requests have at most ``capacity`` tokens, as vLLM's ``max_model_len`` limits them."""

    def __init__(self, engine: Any, capacity: int) -> None:
        self._engine = engine
        self.capacity = capacity

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        validate_request(request, self._engine.vocab_size, self.capacity)
        return self._engine.generate(request)


def read_body(body: Any) -> Any:
    """Return a request's body, parsed where it is JSON. Raises PredictionException 400."""
    if isinstance(body, (bytes, bytearray, memoryview)):
        body = bytes(body).decode(errors="replace")
    if isinstance(body, str) and body.lstrip().startswith("{"):
        try:
            return json_text.loads(body)
        except ValueError as error:
            raise PredictionException(f"The body is no JSON: {error}.", 400) from None
    return body


def _point_to_folder(context: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return a manifest and the system properties by which ``llm`` finds its model in ``folder``."""
    properties = context.system_properties
    if not context.manifest:
        return context.manifest, {**properties, "model_dir": str(folder)}
    model = {**(context.manifest.get("model") or {}), "serializedFile": str(folder.resolve())}
    return {**context.manifest, "model": model}, properties


def _complete_engine(engine: Any, directory: Path) -> Any:
    """Return ``engine`` with the path of a compiled engine, and without arguments that vLLM does not have."""
    if not isinstance(engine, Mapping):
        return engine
    if "engine_dir" in engine:
        compiled = find_local_folder(directory, engine["engine_dir"])
        return {**engine, "engine_dir": str(compiled or engine["engine_dir"])}
    arguments = engine.get("arguments")
    if not arguments or engine.get("name") != "vllm":
        return engine
    known = _read_argument_names()
    for key in arguments.keys() - known:  # as in TorchServe
        logger.warning("model-config.yaml: vllm_engine_config: %s is unknown to this vLLM and ignored.", key)
    return {**engine, "arguments": {key: value for key, value in arguments.items() if key in known}}


def _read_argument_names() -> set[str]:
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
    except ImportError as error:
        raise HandlerLoadError(
            f"model-config.yaml: vLLM is not installed where the model runs ({error}). Name vllm in the "
            "archive's requirements.txt and set useVenv: true, or take engine: {name: transformers}."
        ) from error
    return {field.name for field in dataclasses.fields(AsyncEngineArgs)}
