"""What a model's ``optimize:`` block asks for, done to a loaded model: number format, int8, memory format, compiled."""

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

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_COMPILE = ("mode", "dynamic")
# torch.ao.quantization and the tensors under it announce that torchao takes their place; this torch has them yet.
_ANNOUNCED = r"torch\.ao\.quantization is deprecated|torch\.quantize_per_tensor"


@dataclass(frozen=True)
class Optimisation:
    """``optimize:`` of model-config.yaml, read. ``compile`` has torch.compile's arguments, None: not compiled."""

    compile: Mapping[str, Any] | None = None
    dtype: str | None = None
    quantize: str | None = None
    channels_last: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Optimisation | None:
        """What the whole model-config.yaml asks for; None where it asks for nothing. Raises HandlerLoadError."""
        block = config.get("optimize")
        if not isinstance(block, (Mapping, type(None))):
            raise _wrong("", block, "{compile: true}, {dtype: bfloat16} or {quantize: int8}")
        for key in block or ():
            if key not in _KEYS:
                near = difflib.get_close_matches(str(key), _KEYS, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_KEYS)}."
                raise HandlerLoadError(f"model-config.yaml: optimize has no key {key!r}; {hint}")
        block = block or {}
        if block.get("dtype") not in (None, *_DTYPES):
            raise _wrong(".dtype", block["dtype"], " or ".join(_DTYPES))
        if block.get("quantize") not in (None, "int8"):
            raise _wrong(".quantize", block["quantize"], "int8")
        if block.get("channels_last", False) not in (True, False):
            raise _wrong(".channels_last", block["channels_last"], "true or false")
        asked = cls(
            _compile(block.get("compile")), block.get("dtype"), block.get("quantize"), bool(block.get("channels_last"))
        )
        if asked.quantize and (asked.dtype or asked.compile is not None):
            other = "dtype" if asked.dtype else "compile"
            raise HandlerLoadError(
                f"model-config.yaml: optimize has quantize and {other}, and int8 layers take float32 and are compiled "
                f"already. Take one of the two out."
            )
        if asked.compile is not None and config.get("pt2") is not None:
            raise HandlerLoadError("model-config.yaml: optimize.compile and pt2 both compile the model; keep one.")
        return None if asked == cls() else asked

    @property
    def lossy(self) -> bool:
        """Whether the outputs change by more than the order of additions does."""
        return self.dtype is not None or self.quantize is not None

    def __str__(self) -> str:
        said = {"compile": dict(self.compile) or True} if self.compile is not None else {}
        said |= {key: value for key in _KEYS[1:] if (value := getattr(self, key))}
        return f"{{{', '.join(f'{key}: {str(value).lower()}' for key, value in said.items())}}}"

    def applied(self, model: Any, device: torch.device, file: Path | None = None) -> Any:
        """``model`` in eval mode as asked for: itself, changed in place, or with ``quantize`` a copy.

        It takes and gives what it took and gave, also in another number format. ``file`` is where an ONNX
        graph came from. Raises HandlerLoadError for what does not apply to the model.
        """
        if file is not None and file.suffix == ".onnx":
            return self._graph(file, device)
        if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
            raise HandlerLoadError(
                f"model-config.yaml: optimize: {self} is for models that PyTorch runs from their class, and this is a "
                f"{type(model).__name__}. Archive the class and its state dict (--model-file model.py), or take "
                "optimize out; `torchrelay optimize` makes a graph of an archive whose class is there."
            )
        if self.quantize:
            model = _int8(model, device)
        if self.channels_last:
            if not any(isinstance(module, (torch.nn.Conv2d, torch.nn.ConvTranspose2d)) for module in model.modules()):
                raise HandlerLoadError(
                    "model-config.yaml: optimize.channels_last is for convolutions over images, and this model has no "
                    "Conv2d. Take channels_last out."
                )
            model.to(memory_format=torch.channels_last)
        if self.dtype:
            _in_format(model, _DTYPES[self.dtype])
        if self.compile is not None:
            _import_compiler()
            model.compile(**self.compile)  # in place: it stays of its class, with its attributes
        return model

    def _graph(self, file: Path, device: torch.device) -> Any:
        if self != Optimisation(quantize="int8"):
            raise HandlerLoadError(
                f"model-config.yaml: optimize: {self}: to an ONNX graph quantize: int8 alone applies. Take the rest "
                "out; the number format of a graph is chosen as it is exported."
            )
        _on_a_cpu(device)
        from handlers.onnx import OnnxModel  # late: it imports onnxruntime

        with tempfile.TemporaryDirectory(prefix="int8-") as directory:
            quantize_graph(file, Path(directory) / file.name)
            return OnnxModel(Path(directory) / file.name, device)


_KEYS = ("compile", "dtype", "quantize", "channels_last")


def buckets(batch_size: int) -> list[int]:
    """The batch sizes that a compiled model is warmed up for: 1, 2, 4 ... and ``batch_size``."""
    sizes = [1]
    while sizes[-1] * 2 < batch_size:
        sizes.append(sizes[-1] * 2)
    return [*sizes, batch_size] if batch_size > 1 else sizes


def _compile(asked: Any) -> Mapping[str, Any] | None:
    if asked is None or asked is False:
        return None
    if asked is True:
        return {}
    if not isinstance(asked, Mapping) or not set(asked) <= set(_COMPILE):
        raise _wrong(".compile", asked, "true, or a mapping with mode and dynamic")
    if not isinstance(asked.get("dynamic"), (bool, type(None))):
        raise _wrong(".compile.dynamic", asked["dynamic"], "true or false")
    modes = torch._inductor.list_mode_options()
    if asked.get("mode", "default") not in modes:
        raise _wrong(".compile.mode", asked["mode"], f"one of {', '.join(modes)}")
    return dict(asked)


def _import_compiler() -> None:
    """Now, and not at the first call, because it announces a deprecation of its own making as it is imported."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")


def _wrong(key: str, value: Any, wanted: str) -> HandlerLoadError:
    return HandlerLoadError(f"model-config.yaml: optimize{key} is {value!r}; write {wanted}.")


def _int8(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """A copy whose Linear layers hold int8 weights, and make int8 of their inputs batch by batch."""
    _on_a_cpu(device)
    if not any(type(module) is torch.nn.Linear for module in model.modules()):
        raise HandlerLoadError(
            "model-config.yaml: optimize.quantize: int8 is for Linear layers, and this model has none. "
            "Take quantize out; dtype: bfloat16 suits convolutions."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ANNOUNCED)
        by_channel = torch.ao.quantization.per_channel_dynamic_qconfig  # as fast as by tensor, and nearer
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear: by_channel}, dtype=torch.qint8)
    for module in model.modules():  # their fused path reads the weights of Linear layers past the layers
        if isinstance(module, torch.nn.TransformerEncoderLayer):
            module.register_forward_pre_hook(_nothing)
        elif isinstance(module, torch.nn.TransformerEncoder):
            module.use_nested_tensor = False
    return model


def quantize_graph(graph: Path, into: Path) -> None:
    """The ONNX graph in the file ``graph`` with int8 weights, by channel, written to ``into``; its activations become
    int8 batch by batch."""
    try:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        raise HandlerLoadError(
            f"{graph}: making int8 of an ONNX graph needs the package {error.name}: install torchrelay[onnx] where the "
            "model runs, or let `torchrelay optimize` quantize the archive beforehand."
        ) from error
    model = onnx.load(graph)
    del model.graph.value_info[:]  # the exporter's shapes of what lies between do not fit int8 nodes
    clean = into.with_name("clean.onnx")
    onnx.save(model, clean)
    try:
        quantize_dynamic(clean, into, per_channel=True, weight_type=QuantType.QInt8)
    finally:
        clean.unlink()


def _on_a_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise HandlerLoadError(
            "model-config.yaml: optimize.quantize: int8 runs on CPUs, and this replica has a GPU. Use dtype: float16 "
            "there, or give the model no GPU (deviceType: cpu)."
        )


def _nothing(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """A layer with a hook does not take its fused path."""


def _in_format(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Parameters and buffers in ``dtype``; floats on their way in become ``dtype``, on their way out float32."""
    model.to(dtype)

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return pytree.tree_map(lambda value: _cast(value, dtype), (args, kwargs))

    def leave(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return pytree.tree_map(lambda value: _cast(value, torch.float32), output)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
