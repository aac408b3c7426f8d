"""Loading of a causal language model: onto one device, over several devices, or split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from handlers import engines, extras
from handlers.distributed import auto_tp, mii, process_group
from handlers.distributed.degrees import degrees, layout
from handlers.errors import HandlerLoadError
from handlers.loading import device


def load(folder: Path, gpu_id: int | None, config: Mapping[str, Any]) -> Any:
    """Load the causal language model in ``folder`` as ``config`` (model-config.yaml) configures it.

    All ranks of a sharded model load at the same time, each its own part. The model has transformers'
    ``generate`` and ``config``. Raises HandlerLoadError for unknown or impossible options, and for missing
    dependencies.
    """
    options = config.get("engine") or {}
    if not isinstance(options, Mapping):
        raise HandlerLoadError(f"model-config.yaml: engine is {options!r}; it is {{name: transformers}}.")
    name = options.get("name", "transformers")
    if not isinstance(name, str) or name not in _ENGINES:
        hint = engines.did_you_mean(str(name), _ENGINES)
        raise HandlerLoadError(f"model-config.yaml: causal_lm has no engine {name!r}.{hint}")
    for key in options:
        if key != "name":
            raise HandlerLoadError(
                f"model-config.yaml: causal_lm's engine has no option {key!r}; it has a name alone."
            )
    tensor, pipeline = degrees(config)
    device_options = layout(config)
    if device_options and name == "transformers":
        return _load_distributed(folder, device_options).eval()
    if device_options:
        raise HandlerLoadError(
            f"model-config.yaml: {next(iter(device_options))} needs engine: {{name: transformers}}; "
            f"{name} has no such thing."
        )
    return _ENGINES[name](folder, gpu_id, tensor, pipeline).eval()


def input_device(model: Any) -> torch.device:
    """Return the device of a model's inputs: offloaded weights may lie on the disk or in main memory."""
    hook = getattr(model, "_hf_hook", None)  # accelerate's
    return model.device if hook is None else torch.device(hook.execution_device)


def _load_transformers(folder: Path, gpu_id: int | None, tensor: int, pipeline: int) -> Any:
    if tensor * pipeline > 1:
        return _read(folder, distributed_config=process_group.distributed_config(folder, tensor, pipeline))
    return _read(folder, device_map=device.select_device(gpu_id))


def _load_distributed(folder: Path, options: dict[str, Any]) -> Any:
    """Load a model with its layers on GPUs, in memory and on the disk.

    accelerate copies offloaded layers to the computing device.
    """
    if "device_map" not in options:
        raise HandlerLoadError(
            f"model-config.yaml: {next(iter(options))} belongs to a device_map; write device_map: auto "
            "beside it."
        )
    if not isinstance(options.get("max_memory", {}), Mapping):
        invalid = options["max_memory"]
        raise HandlerLoadError(f"model-config.yaml: max_memory is {invalid!r}; it is {{0: 20GB, cpu: 60GB}}.")
    require_package("accelerate", "device_map")
    try:
        return _read(folder, **options)
    except ValueError as error:
        raise HandlerLoadError(f"model-config.yaml: {', '.join(options)}: {error}") from error


def _load_deepspeed(folder: Path, gpu_id: int | None, tensor: int, pipeline: int) -> Any:
    """Load a model with DeepSpeed's AutoTP: each rank reads all of it before it frees the others' parts."""
    if tensor == 1 or pipeline > 1:
        raise HandlerLoadError(
            "model-config.yaml: engine: deepspeed cuts each layer up: give tensor_parallel, from 2, and no "
            "pipeline_parallel. A model that stays whole, or a pipeline, has engine: {name: transformers}."
        )
    require_package("deepspeed", "engine: deepspeed")
    process_group.check_parallelism(folder, tensor, pipeline)
    model = _read(folder)
    return auto_tp.shard(model, tensor, folder, dtype=model.dtype).module


def require_package(package: str, key: str) -> None:
    """Raise HandlerLoadError, with the ``pip`` command, where the package of a configured key is missing."""
    if not extras.is_installed(package):
        raise HandlerLoadError(
            f"model-config.yaml: {key} needs {package}, which is not installed where the model runs: "
            f"{extras.install_command(package)}"
        )


def _read(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, **options
    )


# The name in model-config.yaml -> the function that loads a model.
_ENGINES: dict[str, Callable[[Path, int | None, int, int], Any]] = {
    "transformers": _load_transformers,
    "deepspeed": _load_deepspeed,
    "mii": mii.load,
}
