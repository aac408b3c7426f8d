"""The parallelism of model-config.yaml and its checks against a model, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from handlers.errors import HandlerLoadError


def degrees(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return ``tensor_parallel`` and ``pipeline_parallel`` of a model-config.yaml; both default to 1."""
    return config.get("tensor_parallel") or 1, config.get("pipeline_parallel") or 1


def layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``device_map``, ``max_memory`` and ``offload_folder`` of a model-config.yaml, if set.

    They distribute a model over the devices of one process. Raises HandlerLoadError where the model is also
    split over several processes.
    """
    options = {
        key: config[key]
        for key in ("device_map", "max_memory", "offload_folder")
        if config.get(key) is not None
    }
    tensor, pipeline = degrees(config)
    if options and tensor * pipeline > 1:
        split = "tensor_parallel" if tensor > 1 else "pipeline_parallel"
        raise HandlerLoadError(
            f"{next(iter(options))} lays the model out over the devices of one process, and {split} cuts it "
            "up for "
            "several. Take one of the two away."
        )
    return options


def check_divisible(config: Any, tensor: int, pipeline: int, where: object) -> None:
    """Raise HandlerLoadError where a model with this Hugging Face ``config`` cannot be split that way."""
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads and kv_heads and (heads % tensor or kv_heads % tensor):
        common = gcd(heads, kv_heads)
        divisors = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise HandlerLoadError(
            f"{where}: tensor_parallel: {tensor} does not divide {heads} attention heads and {kv_heads} "
            "key-value "
            f"heads. These do: {divisors}."
        )
    layers = getattr(config, "num_hidden_layers", None)
    if layers and layers < pipeline:
        raise HandlerLoadError(
            f"{where}: pipeline_parallel: {pipeline} is more than the model's {layers} layers. Ask for fewer."
        )
