"""Models over several processes: what a registration can know of the cut before any of them starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from handlers.degrees import degrees, layout, must_divide
from handlers.errors import HandlerLoadError
from serve_app.errors import ConfigurationError

if TYPE_CHECKING:
    from serve_app.store.manifest import ModelConfig

HANDLERS = ("causal_lm", "llm")  # the built-in ones that are cut up by configuration alone

_OURS = {"tp": "tensor_parallel", "pp": "pipeline_parallel"}


def translated(config: ModelConfig) -> ModelConfig:
    """TorchServe's ``parallelType: tp`` or ``pp`` in our own keys, for a handler of ``HANDLERS``.

    Its number is ``parallelLevel``, or torchrun's ``nproc-per-node``. The file's own ``tensor_parallel`` and
    ``pipeline_parallel`` go before it.
    """
    key = _OURS.get(config.parallel_type or "")
    level = config.parallel_level or (config.torchrun or {}).get("nproc-per-node")
    if key is None or type(level) is not int or config.tensor_parallel or config.pipeline_parallel:
        return config
    raw = {**config.raw, key: level}
    if key == "tensor_parallel":
        return replace(config, tensor_parallel=level, raw=raw)
    return replace(config, pipeline_parallel=level, raw=raw)


def check(directory: Path, config: ModelConfig, where: str) -> None:
    """Raise ConfigurationError where the Hugging Face model in ``directory`` cannot be cut as ``config`` says."""
    try:
        layout(config.raw)
    except HandlerLoadError as error:
        raise ConfigurationError(where, str(error)) from None
    tensor, pipeline = degrees(config.raw)
    places = [directory / "config.json", *sorted(directory.glob("*/config.json"))]
    file = next((place for place in places if place.is_file()), None)
    if tensor * pipeline == 1 or file is None:
        return
    try:
        said = json.loads(file.read_bytes())
        said = {**said, **(said.get("text_config") or {})}
    except (ValueError, TypeError, AttributeError):
        return  # who loads it says what is wrong with it
    try:
        must_divide(SimpleNamespace(**said), tensor, pipeline, file.relative_to(directory))
    except HandlerLoadError as error:
        raise ConfigurationError(where, str(error)) from None
