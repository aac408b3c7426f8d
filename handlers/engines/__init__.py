"""Engines: what generates the tokens of many requests at once, batching by itself.

``start`` makes the one that model-config.yaml names; the words that they share are in ``engine.py``.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handlers.engines.engine import Engine
from handlers.errors import HandlerLoadError

__all__ = ["ENGINES", "near", "start"]

# The name in model-config.yaml -> "module:Class", imported when asked for.
ENGINES: dict[str, str] = {
    "transformers": "handlers.engines.continuous_batching:ContinuousBatching",
    "vllm": "handlers.engines.vllm:VLLM",
}
_OF_CAUSAL_LM = ("deepspeed", "mii")


async def start(folder: Path, gpu_id: int | None, options: Mapping[str, Any], tensor_parallel: int = 1) -> Engine:
    """The engine ``options["name"]`` (``transformers`` without it), running the Hugging Face model in ``folder``.

    ``options`` is model-config.yaml's ``engine`` without ``max_new_tokens``, which is the handler's. Of a model over
    ``tensor_parallel`` ranks every rank starts one, all at the same time, and rank 0's is asked. Raises
    HandlerLoadError for a name or an option that is not known, and where what the engine needs is not installed.
    """
    options = dict(options)
    name = options.pop("name", "transformers")
    place = ENGINES.get(name) if isinstance(name, str) else None
    if place is None:
        where = f" {name} is one of the handler causal_lm." if name in _OF_CAUSAL_LM else ""
        raise HandlerLoadError(f"model-config.yaml: llm has no engine {name!r}.{where}{near(name, ENGINES)}")
    module, _, class_name = place.partition(":")
    engine = getattr(importlib.import_module(module), class_name)
    for key in options:
        if key not in engine.OPTIONS:
            raise HandlerLoadError(
                f"model-config.yaml: engine: {name} has no option {key!r}.{near(key, (*engine.OPTIONS, 'name'))}"
            )
    return await engine.start(folder, gpu_id, options, tensor_parallel)


def near(word: Any, known: Any) -> str:
    """What to say of a word that is none of ``known``: the one that was meant, perhaps, and which there are."""
    meant = difflib.get_close_matches(str(word), known, 1)
    hint = f" Did you mean {meant[0]!r}?" if meant else ""
    return f"{hint} There are {', '.join(known)}."
