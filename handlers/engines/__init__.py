"""Generation engines, which batch many requests at once.

``start`` creates the engine that model-config.yaml names; ``engine.py`` defines the interface of all engines.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from handlers.engines.engine import Engine
from handlers.errors import HandlerLoadError

__all__ = ["ENGINES", "did_you_mean", "start"]

# The name in model-config.yaml -> "module:Class", imported on first use.
ENGINES: dict[str, str] = {
    "transformers": "handlers.engines.continuous_batching:ContinuousBatching",
    "tensorrt_llm": "handlers.engines.tensorrt_llm:TensorRTLLM",
    "vllm": "handlers.engines.vllm:VLLM",
}
_CAUSAL_LM_ENGINES = ("deepspeed", "mii")


async def start(
    folder: Path, gpu_id: int | None, options: Mapping[str, Any], tensor_parallel: int = 1
) -> Engine:
    """Start the engine ``options["name"]`` (default: ``transformers``) with the Hugging Face model in
    ``folder``.

    ``options`` is the ``engine`` mapping of model-config.yaml without ``max_new_tokens``, which the handler
    reads. With ``tensor_parallel`` ranks, every rank starts one engine at the same time, and only rank 0's
    receives requests. Raises HandlerLoadError for an unknown name or option, and for missing dependencies.
    """
    options = dict(options)
    name = options.pop("name", "transformers")
    target = ENGINES.get(name) if isinstance(name, str) else None
    if target is None:
        hint = f" {name} is one of the handler causal_lm." if name in _CAUSAL_LM_ENGINES else ""
        raise HandlerLoadError(
            f"model-config.yaml: llm has no engine {name!r}.{hint}{did_you_mean(name, ENGINES)}"
        )
    module, _, class_name = target.partition(":")
    engine = getattr(importlib.import_module(module), class_name)
    for key in options:
        if key not in engine.OPTIONS:
            raise HandlerLoadError(
                f"model-config.yaml: engine: {name} has no option {key!r}."
                f"{did_you_mean(key, (*engine.OPTIONS, 'name'))}"
            )
    return await engine.start(folder, gpu_id, options, tensor_parallel)


def did_you_mean(name: object, known: Collection[str]) -> str:
    """Return a hint for an unknown name: its closest match in ``known``, if any, and all known names."""
    matches = difflib.get_close_matches(str(name), known, 1)
    hint = f" Did you mean {matches[0]!r}?" if matches else ""
    return f"{hint} There are {', '.join(known)}."
