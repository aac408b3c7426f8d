"""Checks of models over several processes that are possible before any of them starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from handlers.distributed.degrees import check_divisible, degrees, layout
from handlers.errors import HandlerLoadError
from serve_app.errors import ConfigurationError

if TYPE_CHECKING:
    from serve_app.model_store.model_config import ModelConfig

HANDLERS = ("causal_lm", "llm")  # built-in handlers that are sharded by configuration alone

_OWN_KEYS = {"tp": "tensor_parallel", "pp": "pipeline_parallel"}


def translate(config: ModelConfig) -> ModelConfig:
    """Translate TorchServe's ``parallelType: tp`` or ``pp`` to own keys, for a handler of ``HANDLERS``.

    The number is ``parallelLevel``, or torchrun's ``nproc-per-node``. The file's own ``tensor_parallel`` and
    ``pipeline_parallel`` take precedence.
    """
    key = _OWN_KEYS.get(config.parallel_type or "")
    level = config.parallel_level or (config.torchrun or {}).get("nproc-per-node")
    if key is None or type(level) is not int or config.tensor_parallel or config.pipeline_parallel:
        return config
    translated: dict[str, Any] = {key: level, "raw": {**config.raw, key: level}}
    return replace(config, **translated)


def check(directory: Path, config: ModelConfig, where: str) -> None:
    """Raise ConfigurationError where the model in ``directory`` cannot be sharded as configured."""
    try:
        layout(config.raw)
    except HandlerLoadError as error:
        raise ConfigurationError(where, str(error)) from None
    tensor, pipeline = degrees(config.raw)
    candidates = [directory / "config.json", *sorted(directory.glob("*/config.json"))]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if tensor * pipeline == 1 or file is None:
        return
    try:
        model_config = json.loads(file.read_bytes())
        model_config = {**model_config, **(model_config.get("text_config") or {})}
    except (ValueError, TypeError, AttributeError):
        return  # loading it will report the error
    try:
        check_divisible(SimpleNamespace(**model_config), tensor, pipeline, file.relative_to(directory))
    except HandlerLoadError as error:
        raise ConfigurationError(where, str(error)) from None
