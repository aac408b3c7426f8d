"""ONNX Runtime's execution providers: those of model-config.yaml, and their limits of memory.

``onnx: {providers: [tensorrt, cuda]}`` names them in order of preference. An operator that the first does not
support runs in the next one, and in the end on the CPU.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from handlers.errors import HandlerLoadError

Provider = tuple[str, dict[str, Any]]  # ONNX Runtime's name, and its options

# The name in model-config.yaml -> ONNX Runtime's name.
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
_NAMES = {long: short for short, long in PROVIDERS.items()}
_ON_GPU = ("cuda", "tensorrt")
_PACKAGES = {
    "cuda": "onnxruntime-gpu (pip install 'torchrelay[gpu]')",
    "tensorrt": "onnxruntime-gpu (pip install 'torchrelay[gpu]') and TensorRT's libraries",
    "openvino": "onnxruntime-openvino in place of onnxruntime",
}


def select_providers(
    config: Mapping[str, Any],
    device: str,
    index: int,
    available: Collection[str],
    memory_limit: int | None = None,
) -> list[Provider]:
    """Return the providers of a graph, with their options, for the device ``cpu`` or ``cuda``.

    ``config`` is a whole model-config.yaml; without ``onnx.providers`` the device decides. ``available`` has
    ONNX Runtime's names; ``memory_limit`` bounds the bytes on the GPU. Raises HandlerLoadError for a provider
    that is unknown, not installed, or for another device.
    """
    requested = _parse(config) or [(device, {})]
    providers: list[Provider] = []
    for name, options in requested:
        if name not in PROVIDERS:
            matches = difflib.get_close_matches(str(name), PROVIDERS, 1)
            hint = f"did you mean {matches[0]!r}?" if matches else f"there are {', '.join(PROVIDERS)}."
            raise _error(f"there is no provider {name!r}; {hint}")
        if PROVIDERS[name] not in available:
            installed = ", ".join(_NAMES[long] for long in available if long in _NAMES)
            raise _error(
                f"the installed onnxruntime has no {name}, it has {installed}. Install {_PACKAGES.get(name)}."
            )
        if name in _ON_GPU and device != "cuda":
            raise _error(f"{name} needs a GPU, and this replica has none; set num_gpus, or take {name} out.")
        providers.append((PROVIDERS[name], {**_defaults(name, index, memory_limit), **options}))
    return providers


def _parse(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and options under ``onnx.providers``."""
    block = config.get("onnx")
    if block is None:
        return []
    names = block.get("providers") if isinstance(block, Mapping) and set(block) <= {"providers"} else None
    if not isinstance(names, list) or not names:
        raise _error(f"onnx is {block!r}; write {{providers: [NAME, …]}}.")
    parsed: list[tuple[Any, dict[str, Any]]] = []
    for entry in names:
        pairs = list(entry.items()) if isinstance(entry, Mapping) else [(entry, {})]
        if len(pairs) != 1 or not isinstance(pairs[0][1], Mapping):
            raise _error(f"onnx.providers has {entry!r}; write a name, or {{NAME: {{OPTION: value}}}}.")
        name, options = pairs[0]
        parsed.append((_NAMES.get(name, name), dict(options)))
    return parsed


def _defaults(name: str, index: int, memory_limit: int | None) -> dict[str, Any]:
    """Return the options of a provider on GPU ``index``."""
    if name not in _ON_GPU:
        return {}
    options: dict[str, Any] = {"device_id": index}
    if memory_limit is None:
        return options
    if name == "tensorrt":
        return {**options, "trt_max_workspace_size": memory_limit}
    # By default the arena doubles, which would reach the limit at half of its use.
    return {**options, "gpu_mem_limit": memory_limit, "arena_extend_strategy": "kSameAsRequested"}


def _error(problem: str) -> HandlerLoadError:
    return HandlerLoadError(f"model-config.yaml: onnx: {problem}")
