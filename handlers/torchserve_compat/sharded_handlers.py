"""TorchServe's base handlers of sharded models: DeepSpeed's, and PiPPy's on transformers' pipelines.

The server starts a rank for each process that ``torchrun: {nproc-per-node}`` or ``parallelLevel`` requests,
and each rank loads its own part.
"""

from __future__ import annotations

import json
import logging
import os
from abc import ABC
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from handlers.base import BaseHandler
from handlers.distributed import auto_tp, placement, process_group
from handlers.errors import HandlerLoadError
from handlers.loading import device
from handlers.torchserve_compat.names import REPLACED

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


class BaseDeepSpeedHandler(BaseHandler, ABC):
    """A base of handlers that load a model by ``get_ds_engine``; ``initialize`` selects the device."""

    def initialize(self, ctx: Any) -> None:
        self.device = device.select_device(ctx.system_properties.get("gpu_id"))


class BasePippyHandler(BaseHandler, ABC):
    """A base of handlers that load a model by ``get_pipeline_driver``; it has the rank and the device."""

    def initialize(self, ctx: Any) -> None:
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = _world_size()
        self.device = device.select_device(ctx.system_properties.get("gpu_id"))


def get_ds_engine(model: Any, ctx: Any) -> Any:
    """Return DeepSpeed's engine of a transformers ``model``, split over the ranks by AutoTP.

    A model on the device ``meta`` gets the weights in ``handler: model_path``. ``deepspeed: config`` names
    the JSON file with the arguments of ``deepspeed.init_inference``. Raises HandlerLoadError.
    """
    if "deepspeed" not in ctx.model_yaml_config:
        raise HandlerLoadError(
            f"model-config.yaml of {ctx.model_name}: get_ds_engine needs the key deepspeed, with config: "
            "ds-config.json."
        )
    placement.require_package("deepspeed", "deepspeed")
    options = _read_options(ctx.model_yaml_config["deepspeed"], Path(ctx.system_properties["model_dir"]))
    ranks = _world_size()
    requested = (options.pop("tensor_parallel", None) or {}).get("tp_size", ranks)
    if requested != ranks:
        raise HandlerLoadError(
            f"{ctx.model_name}: its DeepSpeed configuration has tp_size {requested}, and the model runs in "
            f"{ranks} process{'es' if ranks > 1 else ''}: set parallelType: tp and torchrun: "
            f"{{nproc-per-node: {requested}}} in model-config.yaml."
        )
    path = _model_path(ctx)
    dtype = options.setdefault("dtype", model.dtype)
    if _is_meta(model):
        model = type(model).from_pretrained(
            path, config=model.config, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    return auto_tp.shard(model.eval(), ranks, path, **options)


def get_pipeline_driver(model: Any, world_size: int, ctx: Any) -> Any:
    """Return a transformers model whose layers are split over ``world_size`` ranks; it has ``generate``.

    The weights are those in ``handler: model_path``. Raises HandlerLoadError for other models than those of
    ``pippy: {model_type: HF}``, with the replacement.
    """
    options = ctx.model_yaml_config.get("pippy") or {}
    if options.get("model_type") != "HF" or not hasattr(type(model), "from_pretrained"):
        raise HandlerLoadError(
            f"{ctx.model_name}: pippy: model_type is {options.get('model_type')!r}. {REPLACED['pippy']}"
        )
    for key in ("rpc_timeout", "num_worker_threads", "chunks"):
        if key in options:
            logger.warning("model-config.yaml: pippy: %s has no effect: the ranks use no RPC.", key)
    path = _model_path(ctx)
    split: dict[str, Any] = {}
    if world_size > 1:
        split["distributed_config"] = process_group.distributed_config(Path(path), 1, world_size)
    return (
        type(model)
        .from_pretrained(
            path,
            config=model.config,
            dtype=model.dtype,
            local_files_only=True,
            trust_remote_code=False,
            **split,
        )
        .eval()
    )


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _is_meta(model: torch.nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _model_path(ctx: Any) -> str:
    """Return ``handler: model_path``, a folder of the archive or elsewhere."""
    path = (ctx.model_yaml_config.get("handler") or {}).get("model_path")
    folder = Path(ctx.system_properties["model_dir"]) / str(path)
    if path is None or not folder.is_dir():
        raise HandlerLoadError(
            f"model-config.yaml of {ctx.model_name}: handler: model_path is {path!r}, which is no folder: "
            "archive the model's Hugging Face folder and name it there."
        )
    return str(folder)


def _read_options(section: Any, directory: Path) -> dict[str, Any]:
    """Return the arguments of ``deepspeed.init_inference`` in the file that ``deepspeed: config`` names."""
    name = section.get("config") if isinstance(section, Mapping) else None
    if name is None:
        return {}
    try:
        options = json.loads((directory / name).read_bytes())
    except (OSError, ValueError) as error:
        raise HandlerLoadError(
            f"{directory / name}: the DeepSpeed configuration cannot be read: {error}"
        ) from None
    if not isinstance(options, dict):
        raise HandlerLoadError(f"{directory / name}: a DeepSpeed configuration is a JSON object.")
    if "dtype" in options:
        options["dtype"] = _parse_dtype(options["dtype"], directory / name)
    if options.get("replace_with_kernel_inject") and not torch.cuda.is_available():
        logger.warning("%s: replace_with_kernel_inject needs a GPU and has no effect here.", name)
        options["replace_with_kernel_inject"] = False
    return options


def _parse_dtype(value: Any, file: Path) -> torch.dtype:
    name = str(value).removeprefix("torch.")
    dtype = getattr(torch, _DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise HandlerLoadError(f"{file}: dtype {value!r} is none of torch: write torch.float16, for example.")
    return dtype
