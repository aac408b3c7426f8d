"""How a language model gets to its devices: whole, laid out over what there is, or a part of it to each rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from handlers import device, engines, mii, sharding
from handlers.degrees import degrees, layout
from handlers.errors import HandlerLoadError


def load(folder: Path, gpu_id: int | None, config: Mapping[str, Any]) -> Any:
    """The causal language model in ``folder``, for evaluation, as ``config`` (model-config.yaml) says.

    Of a sharded model it is this rank's part, and all ranks load at the same time. What it gives has transformers'
    ``generate`` and ``config``. Raises HandlerLoadError where something is not known, not installed, or cannot be.
    """
    options = config.get("engine") or {}
    if not isinstance(options, Mapping):
        raise HandlerLoadError(f"model-config.yaml: engine is {options!r}; it is {{name: transformers}}.")
    name = options.get("name", "transformers")
    if not isinstance(name, str) or name not in _ENGINES:
        near = engines.near(name, _ENGINES)
        raise HandlerLoadError(f"model-config.yaml: causal_lm has no engine {name!r}.{near}")
    for key in options:
        if key != "name":
            raise HandlerLoadError(f"model-config.yaml: causal_lm's engine has no option {key!r}; it has a name alone.")
    tensor, pipeline = degrees(config)
    laid_out = layout(config)
    if laid_out and name == "transformers":
        return _laid_out(folder, laid_out).eval()
    if laid_out:
        raise HandlerLoadError(
            f"model-config.yaml: {next(iter(laid_out))} needs engine: {{name: transformers}}; {name} has no such thing."
        )
    return _ENGINES[name](folder, gpu_id, tensor, pipeline).eval()


def entrance(model: Any) -> torch.device:
    """Where a model takes its inputs in: its own weights may be on the disk, or in memory for another to compute."""
    hook = getattr(model, "_hf_hook", None)  # accelerate's
    return model.device if hook is None else torch.device(hook.execution_device)


def _transformers(folder: Path, gpu_id: int | None, tensor: int, pipeline: int) -> Any:
    if tensor * pipeline > 1:
        return _read(folder, distributed_config=sharding.plan(folder, tensor, pipeline))
    return _read(folder, device_map=device.choose(gpu_id))


def _laid_out(folder: Path, how: dict[str, Any]) -> Any:
    """Layer by layer on GPUs, in memory and on the disk; what is not on the device that computes is brought there."""
    if "device_map" not in how:
        raise HandlerLoadError(
            f"model-config.yaml: {next(iter(how))} belongs to a device_map; write device_map: auto beside it."
        )
    if not isinstance(how.get("max_memory", {}), Mapping):
        wrong = how["max_memory"]
        raise HandlerLoadError(f"model-config.yaml: max_memory is {wrong!r}; it is {{0: 20GB, cpu: 60GB}}.")
    if importlib.util.find_spec("accelerate") is None:
        raise HandlerLoadError(
            "model-config.yaml: device_map needs accelerate: pip install 'torchrelay[llm]' where the model runs."
        )
    try:
        return _read(folder, **how)
    except ValueError as error:
        raise HandlerLoadError(f"model-config.yaml: {', '.join(how)}: {error}") from error


def _deepspeed(folder: Path, gpu_id: int | None, tensor: int, pipeline: int) -> Any:
    """DeepSpeed's AutoTP. Each rank reads the whole model before it lets go of what is the others'."""
    if tensor == 1 or pipeline > 1:
        raise HandlerLoadError(
            "model-config.yaml: engine: deepspeed cuts each layer up: give tensor_parallel, from 2, and no "
            "pipeline_parallel. A model that stays whole, or a pipeline, has engine: {name: transformers}."
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise HandlerLoadError(
            "model-config.yaml: engine: deepspeed is not installed: pip install 'torchrelay[deepspeed]' where the "
            "model runs."
        )
    import deepspeed
    import deepspeed.ops

    sharding.check(folder, tensor, pipeline)
    model = _read(folder)
    # No operation of DeepSpeed's own is compiled: its sums in shared memory take minutes of a C++ compiler at the
    # first start, leave a lock behind where that is killed, and crash where the ranks are not all on one machine.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
    try:
        engine = deepspeed.init_inference(
            model, tensor_parallel={"tp_size": tensor}, dtype=model.dtype, replace_with_kernel_inject=False
        )
    except AssertionError as error:
        raise HandlerLoadError(
            f"{folder}: DeepSpeed cannot cut this model up ({error}). Take engine: {{name: transformers}}."
        ) from error
    return engine.module


def _read(folder: Path, **how: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **how)


# The name in model-config.yaml -> what loads a model.
_ENGINES: dict[str, Callable[[Path, int | None, int, int], Any]] = {
    "transformers": _transformers,
    "deepspeed": _deepspeed,
    "mii": mii.load,
}
