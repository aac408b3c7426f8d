"""Exports of a model as a graph: ONNX, TorchScript, torch.export and AOTInductor."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from handlers.errors import HandlerLoadError
from handlers.loading import weights

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
_TRACING_OPSET = 17  # the newest of the exporter by tracing


def example_inputs(model: Any, calls: list[tuple[Args, Kwargs]]) -> tuple[Args, Kwargs]:
    """Return the recorded call of ``model`` with at least two rows, for tracing.

    Raises HandlerLoadError where the model is a graph already or was not called exactly once.
    """
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise HandlerLoadError(f"a {type(model).__name__} is a graph already")
    if len(calls) != 1:
        raise HandlerLoadError(
            f"inference calls the model {len(calls)} times, and a graph stands for one call"
        )
    with torch.no_grad():
        return pytree.tree_map(_with_two_rows, calls[0])


def export_onnx(model: torch.nn.Module, args: Args, kwargs: Kwargs, file: Path) -> None:
    shapes = _dynamic_shapes(args, kwargs)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        torch.onnx.export(
            model,
            args,
            str(file),
            kwargs=kwargs,
            dynamo=True,
            dynamic_shapes=shapes,
            verbose=False,
            optimize=True,
        )


def export_fusable_onnx(model: torch.nn.Module, args: Args, kwargs: Kwargs, file: Path) -> None:
    """Export the model by tracing, with eager attention: ONNX Runtime fuses these operators only."""
    arguments = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        output = model(*args, **kwargs)
        if attention is not None:
            model.set_attn_implementation("eager")
        try:
            torch.onnx.export(
                model,
                args,
                str(file),
                kwargs=kwargs,
                dynamo=False,
                opset_version=_TRACING_OPSET,
                input_names=names,
                output_names=list(output) if isinstance(output, Mapping) else None,
                dynamic_axes={
                    name: {axis: f"{name}_{axis}" for axis in range(arguments[name].dim())} for name in names
                },
            )
        finally:
            if attention is not None:
                model.set_attn_implementation(attention)


def _export_torchscript(model: torch.nn.Module, args: Args, kwargs: Kwargs, file: Path) -> None:
    """Trace the model without freezing it, which keeps its gradients and its parameters' number format."""
    example: dict[str, Any] = {"example_inputs": args}
    if kwargs:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        example = {"example_kwarg_inputs": dict(bound.arguments)}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and tracing warns of each constant
        torch.jit.trace(model, **example, strict=False, check_trace=False).save(str(file))


def _export_program(model: torch.nn.Module, args: Args, kwargs: Kwargs, file: Path) -> None:
    torch.export.save(_trace_program(model, args, kwargs), file)


def _export_aotinductor(model: torch.nn.Module, args: Args, kwargs: Kwargs, file: Path) -> None:
    program = _trace_program(model, args, kwargs)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    has_embedding = any(
        isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) for module in model.modules()
    )
    metadata = (
        {}
        if dtype is None or has_embedding
        else {weights.DTYPE_METADATA_KEY: str(dtype).removeprefix("torch.")}
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the compiler warns about itself
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(file), inductor_configs={"aot_inductor.metadata": metadata}
        )


EXPORTERS: dict[str, Callable[[torch.nn.Module, Args, Kwargs, Path], None]] = {
    "torchscript": _export_torchscript,
    "export": _export_program,
    "aotinductor": _export_aotinductor,
}


def _trace_program(model: torch.nn.Module, args: Args, kwargs: Kwargs) -> torch.export.ExportedProgram:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(model, args, kwargs, dynamic_shapes=_dynamic_shapes(args, kwargs))


def _dynamic_shapes(args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """Return the exporters' ``dynamic_shapes``: every dimension is as dynamic as the model allows."""

    def dimensions(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO)

    return (*(dimensions(value) for value in args), *(dimensions(value) for value in kwargs.values()))


def _with_two_rows(value: Any) -> Any:
    """Repeat a single row, as exporters take a dimension of 1 for a constant; return no inference tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.cat([value, value]) if value.dim() and len(value) == 1 else value.clone()
