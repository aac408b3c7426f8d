"""The ``optimize:`` block of model-config.yaml, applied to a loaded model.

It selects a number format, int8 quantization, a memory format, and compilation.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from handlers.errors import HandlerLoadError
from handlers.optimize import graph_optimization

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_COMPILE_KEYS = ("mode", "dynamic")
# Deprecation warnings of torch.ao.quantization in favour of torchao; this torch still has it.
_DEPRECATIONS = r"torch\.ao\.quantization is deprecated|torch\.quantize_per_tensor"


@dataclass(frozen=True)
class OptimizationOptions:
    """The parsed ``optimize:`` block; ``compile`` has torch.compile's arguments, None means not compiled."""

    compile: Mapping[str, Any] | None = None
    dtype: str | None = None
    quantize: str | None = None
    channels_last: bool = False
    fuse: bool = False  # operators of an ONNX graph

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> OptimizationOptions | None:
        """Parse a whole model-config.yaml; return None where it enables nothing.

        Raises HandlerLoadError for an unknown key, an invalid value, or options that exclude each other.
        """
        block = config.get("optimize")
        if not isinstance(block, (Mapping, type(None))):
            raise _invalid("", block, "{compile: true}, {dtype: bfloat16} or {quantize: int8}")
        for key in block or ():
            if key not in _KEYS:
                matches = difflib.get_close_matches(str(key), _KEYS, 1)
                hint = f"did you mean {matches[0]!r}?" if matches else f"there are {', '.join(_KEYS)}."
                raise HandlerLoadError(f"model-config.yaml: optimize has no key {key!r}; {hint}")
        block = block or {}
        if block.get("dtype") not in (None, *_DTYPES):
            raise _invalid(".dtype", block["dtype"], " or ".join(_DTYPES))
        if block.get("quantize") not in (None, "int8"):
            raise _invalid(".quantize", block["quantize"], "int8")
        if block.get("channels_last", False) not in (True, False):
            raise _invalid(".channels_last", block["channels_last"], "true or false")
        if block.get("fuse", False) not in (True, False):
            raise _invalid(".fuse", block["fuse"], "true or false")
        options = cls(
            _compile_arguments(block.get("compile")),
            block.get("dtype"),
            block.get("quantize"),
            bool(block.get("channels_last")),
            bool(block.get("fuse")),
        )
        if options.quantize and (options.dtype or options.compile is not None):
            other = "dtype" if options.dtype else "compile"
            raise HandlerLoadError(
                f"model-config.yaml: optimize has quantize and {other}, and int8 layers take float32 and are "
                f"compiled already. Take one of the two out."
            )
        if options.compile is not None and config.get("pt2") is not None:
            raise HandlerLoadError(
                "model-config.yaml: optimize.compile and pt2 both compile the model; keep one."
            )
        return None if options == cls() else options

    @property
    def is_lossy(self) -> bool:
        """Return whether the outputs change by more than a reordering of sums changes them."""
        return self.dtype is not None or self.quantize is not None

    def __str__(self) -> str:
        values = {"compile": dict(self.compile) or True} if self.compile is not None else {}
        values |= {key: value for key in _KEYS[1:] if (value := getattr(self, key))}
        return f"{{{', '.join(f'{key}: {str(value).lower()}' for key, value in values.items())}}}"

    def apply(self, model: Any, device: torch.device, file: Path | None = None) -> Any:
        """Optimize ``model`` (in eval mode) in place, or with ``quantize`` a copy, and return it.

        The types of its inputs and outputs stay the same, also in another number format. ``file`` is the file
        of an ONNX graph. Raises HandlerLoadError for options that do not apply to the model.
        """
        if file is not None and file.suffix == ".onnx":
            return self._optimize_graph(model, file, device)
        if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
            raise HandlerLoadError(
                f"model-config.yaml: optimize: {self} is for models that PyTorch runs from their class, and "
                "this is a "
                f"{type(model).__name__}. Archive the class and its state dict (--model-file model.py), or "
                "take "
                "optimize out; torchrelay optimize makes a graph of an archive whose class is there."
            )
        if self.fuse:
            raise HandlerLoadError(
                "model-config.yaml: optimize.fuse is for ONNX graphs, and this model is a class. Take it "
                "out, or make a graph by torchrelay optimize."
            )
        if self.quantize:
            model = _quantize_linear(model, device)
        if self.channels_last:
            if not any(
                isinstance(module, (torch.nn.Conv2d, torch.nn.ConvTranspose2d)) for module in model.modules()
            ):
                raise HandlerLoadError(
                    "model-config.yaml: optimize.channels_last is for convolutions over images, and this "
                    "model has no "
                    "Conv2d. Take channels_last out."
                )
            model.to(memory_format=torch.channels_last)
        if self.dtype:
            _convert_dtype(model, _DTYPES[self.dtype])
        if self.compile is not None:
            _import_compiler()
            model.compile(**self.compile)  # in place: it keeps its class and attributes
        return model

    def _optimize_graph(self, model: Any, file: Path, device: torch.device) -> Any:
        """Return the ONNX graph of ``file`` fused, and in another number format."""
        if self.compile is not None or self.channels_last or self.dtype == "bfloat16":
            raise HandlerLoadError(
                f"model-config.yaml: optimize: {self}: to an ONNX graph fuse, dtype: float16 and quantize: "
                "int8 apply. Take the rest out."
            )
        if self.quantize:
            _require_cpu(device)
        with tempfile.TemporaryDirectory(prefix="graph-") as directory:
            output = Path(directory) / file.name
            graph_optimization.optimize_graph(
                file, output, fuse=self.fuse, number_format=self.quantize or self.dtype
            )
            return model.with_graph(output)


_KEYS = ("compile", "dtype", "quantize", "channels_last", "fuse")


def warmup_batch_sizes(batch_size: int) -> list[int]:
    """Return the batch sizes to warm up a compiled model with: 1, 2, 4 ... and ``batch_size``."""
    sizes = [1]
    while sizes[-1] * 2 < batch_size:
        sizes.append(sizes[-1] * 2)
    return [*sizes, batch_size] if batch_size > 1 else sizes


def _compile_arguments(value: Any) -> Mapping[str, Any] | None:
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, Mapping) or not set(value) <= set(_COMPILE_KEYS):
        raise _invalid(".compile", value, "true, or a mapping with mode and dynamic")
    if not isinstance(value.get("dynamic"), (bool, type(None))):
        raise _invalid(".compile.dynamic", value["dynamic"], "true or false")
    modes = torch._inductor.list_mode_options()
    if value.get("mode", "default") not in modes:
        raise _invalid(".compile.mode", value["mode"], f"one of {', '.join(modes)}")
    return dict(value)


def _import_compiler() -> None:
    """Import the compiler now rather than at the first call, without its own deprecation warnings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")


def _invalid(key: str, value: Any, expected: str) -> HandlerLoadError:
    return HandlerLoadError(f"model-config.yaml: optimize{key} is {value!r}; write {expected}.")


def _quantize_linear(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return a copy whose Linear layers have int8 weights and quantize their inputs batch by batch."""
    _require_cpu(device)
    if not any(type(module) is torch.nn.Linear for module in model.modules()):
        raise HandlerLoadError(
            "model-config.yaml: optimize.quantize: int8 is for Linear layers, and this model has none. "
            "Take quantize out; dtype: bfloat16 suits convolutions."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _DEPRECATIONS)
        # Per channel is as fast as per tensor, and more accurate.
        per_channel = torch.ao.quantization.per_channel_dynamic_qconfig
        model = torch.ao.quantization.quantize_dynamic(
            model, {torch.nn.Linear: per_channel}, dtype=torch.qint8
        )
    # The fused path of encoder layers reads the float weights, not the quantized layers.
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer):
            module.register_forward_pre_hook(_disable_fused_path)
        elif isinstance(module, torch.nn.TransformerEncoder):
            module.use_nested_tensor = False
    return model


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise HandlerLoadError(
            "model-config.yaml: optimize.quantize: int8 runs on CPUs, and this replica has a GPU. Use dtype: "
            "float16 "
            "there, or give the model no GPU (deviceType: cpu)."
        )


def _disable_fused_path(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """Do nothing: a layer with any forward hook skips its fused path."""


def _convert_dtype(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the model to ``dtype``, and cast its float inputs to it and its float outputs to float32."""
    model.to(dtype)

    def cast_inputs(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return pytree.tree_map(lambda value: _cast(value, dtype), (args, kwargs))

    def cast_output(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return pytree.tree_map(lambda value: _cast(value, torch.float32), output)

    model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    model.register_forward_hook(cast_output)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
