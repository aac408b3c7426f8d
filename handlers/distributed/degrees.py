"""Into how many parts a model-config.yaml cuts a model, and whether the model has so many; known without torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from handlers.errors import HandlerLoadError


def degrees(config: Mapping[str, Any]) -> tuple[int, int]:
    """``tensor_parallel`` and ``pipeline_parallel`` of a model-config.yaml, 1 where it does not say."""
    return config.get("tensor_parallel") or 1, config.get("pipeline_parallel") or 1


def layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """``device_map``, ``max_memory`` and ``offload_folder`` of a model-config.yaml, as far as they are there.

    They lay a model out over the devices of one process: HandlerLoadError beside what cuts it up for several.
    """
    said = {key: config[key] for key in ("device_map", "max_memory", "offload_folder") if config.get(key) is not None}
    tensor, pipeline = degrees(config)
    if said and tensor * pipeline > 1:
        cuts = "tensor_parallel" if tensor > 1 else "pipeline_parallel"
        raise HandlerLoadError(
            f"{next(iter(said))} lays the model out over the devices of one process, and {cuts} cuts it up for "
            "several. Take one of the two away."
        )
    return said


def must_divide(config: Any, tensor: int, pipeline: int, where: object) -> None:
    """Raise HandlerLoadError where a model with this Hugging Face configuration cannot be cut into so many parts."""
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads and kv_heads and (heads % tensor or kv_heads % tensor):
        common = gcd(heads, kv_heads)
        fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise HandlerLoadError(
            f"{where}: tensor_parallel: {tensor} does not divide {heads} attention heads and {kv_heads} key-value "
            f"heads. These do: {fits}."
        )
    layers = getattr(config, "num_hidden_layers", None)
    if layers and layers < pipeline:
        raise HandlerLoadError(
            f"{where}: pipeline_parallel: {pipeline} is more than the model's {layers} layers. Ask for fewer."
        )
