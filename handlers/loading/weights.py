"""A model from the files of its archive, chosen by the weights file's suffix in one table."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from handlers import pickles
from handlers.errors import HandlerLoadError
from handlers.source import list_classes_from_module, load_source

FLOATS = "torchrelay.floats"  # in the metadata of a package of AOTInductor's: the format of numbers that it takes


def eager(model_file: Path, weights: Path | None, trusted: bool = False) -> torch.nn.Module:
    """The one nn.Module class that ``model_file`` defines, made without arguments, on the CPU.

    ``weights`` is its state dict; None leaves the model as its constructor made it. Only a ``trusted``
    file may hold more than tensors, and may then be the whole model, pickled. ValueError where the
    file defines no such class, or more than one.
    """
    model_class = _model_class(_existing(model_file, "model file", "--model-file"))
    if weights is None:
        return model_class()
    read = FORMATS.get(weights.suffix, PICKLED).state
    if read is None:
        raise HandlerLoadError(
            f"{weights}: a {weights.suffix} file is a whole model, not weights for one. "
            "Archive it without --model-file."
        )
    state = read(_existing(weights, "weights file", "--serialized-file"), trusted)
    if isinstance(state, torch.nn.Module):
        return state
    model = model_class()
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise HandlerLoadError(
            f"{weights}: this is no state dict of {model_class.__name__} in {model_file.name}: {error}. "
            "Save model.state_dict() of that very class."
        ) from error
    return model


def load(weights: Path | None, device: torch.device, trusted: bool = False) -> Any:
    """The whole model that ``weights`` holds, on ``device``, for an archive that brings no modelFile.

    Only a ``trusted`` file may run code of its own as it is read.
    """
    if weights is None:
        raise HandlerLoadError(
            "No model weights could be loaded: the manifest names neither serializedFile nor modelFile. "
            "Archive the model with --serialized-file, --model-file or both."
        )
    read = FORMATS.get(weights.suffix, PICKLED).model
    if read is None:
        whole = ", ".join(suffix for suffix, row in FORMATS.items() if row.model is not None)
        raise HandlerLoadError(
            f"{weights}: No model weights could be loaded: the tensors in it need the class that they belong to. "
            f"Archive the model with --model-file model.py, or as a file that holds the whole model ({whole})."
        )
    return read(_existing(weights, "weights file", "--serialized-file"), device, trusted)


def torchscript(weights: Path, device: torch.device, trusted: bool = False) -> torch.jit.ScriptModule:
    """A TorchScript model on ``device``."""
    _existing(weights, "weights file", "--serialized-file")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`torch\.jit\.load` is deprecated", DeprecationWarning)
            return torch.jit.load(str(weights), map_location=device)
    except RuntimeError as error:
        if "PytorchStreamReader" not in str(error):
            raise
        raise HandlerLoadError(f"{weights}: {pickles.NO_TORCHSCRIPT}") from error


def exported(weights: Path, device: torch.device, trusted: bool) -> Callable[..., Any]:
    """A model that torch.export saved, or that AOTInductor compiled for this kind of device, as its content tells."""
    if not trusted:
        raise HandlerLoadError(f"{weights}: {pickles.RUNS_AS_IT_IS_READ}")
    try:
        with zipfile.ZipFile(weights) as file:
            compiled = [name for name in file.namelist() if "/data/aotinductor/" in name]
            notes = [json.loads(file.read(name)) for name in compiled if name.endswith("wrapper_metadata.json")]
        if not compiled:
            return _program(weights, device)
        return _compiled(weights, device, {note["AOTI_DEVICE_KEY"] for note in notes})
    except (MemoryError, HandlerLoadError):
        raise
    except Exception as error:  # damaged files fail in as many ways as there are layers
        raise HandlerLoadError(
            f"{weights}: this cannot be read as what torch.export.save or AOTInductor "
            f"(torch._inductor.aoti_compile_and_package) wrote: {error}. It is damaged, or of another version of "
            f"PyTorch than {torch.__version__}: export the model again with that."
        ) from error


def _program(weights: Path, device: torch.device) -> torch.nn.Module:
    program = torch.export.load(weights)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    module = program.module()
    module.eval = lambda: module  # type: ignore[method-assign]  # it is in one mode for good, and refuses eval()
    module.training = False
    return module


def _compiled(weights: Path, device: torch.device, targets: set[str]) -> Callable[..., Any]:
    from torch._inductor import aoti_load_package

    if targets - {device.type}:
        raise HandlerLoadError(
            f"{weights}: AOTInductor compiled this for {', '.join(sorted(targets))}, and it is to run on {device}. "
            f"Compile it for {device.type}, or change what the model claims (num_gpus in model-config.yaml)."
        )
    model = aoti_load_package(str(weights), device_index=-1 if device.index is None else device.index)
    model.floats = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}.get(
        model.get_metadata().get(FLOATS, "")
    )
    return model


def onnx(weights: Path, device: torch.device, trusted: bool = False) -> Any:
    """An ONNX graph in ONNX Runtime: ``handlers.onnx.OnnxModel``."""
    from handlers.onnx import OnnxModel  # late: few models need ONNX Runtime

    return OnnxModel(weights, device)


class Format(NamedTuple):
    """How to read files of one suffix; None where they hold no such thing."""

    state: Callable[[Path, bool], Mapping[str, torch.Tensor]] | None  # with a modelFile: its state dict, if trusted
    model: Callable[[Path, torch.device, bool], Any] | None  # without one: the whole model, if trusted


def _pickled(weights: Path, trusted: bool) -> Mapping[str, torch.Tensor]:
    try:
        return torch.load(weights, map_location="cpu", weights_only=not trusted)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes fail in as many ways as there are opcodes
        raise HandlerLoadError(
            f"{weights}: this cannot be read as a state dict: it is damaged, or holds more than tensors. {pickles.CURE}"
        ) from error


def _safetensors(weights: Path, trusted: bool) -> Mapping[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(weights)
    except SafetensorError as error:
        raise HandlerLoadError(
            f"{weights}: this is no safetensors file: {error}. Write it with safetensors.torch.save_file."
        ) from error


PICKLED = Format(_pickled, None)  # any other suffix: what torch.save wrote, whatever it is called

FORMATS: dict[str, Format] = {
    ".onnx": Format(None, onnx),
    ".pt": Format(_pickled, torchscript),
    ".pt2": Format(None, exported),
    ".safetensors": Format(_safetensors, None),
}


def _model_class(model_file: Path) -> type[torch.nn.Module]:
    classes = list_classes_from_module(load_source(model_file), torch.nn.Module)
    if len(classes) != 1:
        names = f" ({', '.join(cls.__name__ for cls in classes)})" if classes else ""
        raise ValueError(
            f"{model_file}: {len(classes)} nn.Module classes are defined in it{names}, and there must be exactly one: "
            "the model's. Keep it there and import its parts from another file of the archive (--extra-files)."
        )
    return classes[0]


def _existing(file: Path, what: str, option: str) -> Path:
    if not file.is_file():
        raise HandlerLoadError(
            f"{file}: the {what} that the manifest names is not in the archive. "
            f"Archive the model again with {option} {file.name}."
        )
    return file
