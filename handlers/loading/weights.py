"""A loader of models from the files of an archive, with one table of readers by file suffix."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from handlers.errors import HandlerLoadError
from handlers.loading import pickle_scan
from handlers.loading.module_loader import format_import_error, list_classes_from_module, load_module

# In the metadata of an AOTInductor package: the number format of the model's inputs.
DTYPE_METADATA_KEY = "torchrelay.floats"


def load_eager(model_file: Path, weights: Path | None, trusted: bool = False) -> torch.nn.Module:
    """Return an instance of the one nn.Module class that ``model_file`` defines, made without arguments, on
    the CPU.

    ``weights`` is its state dict; None leaves the model as its constructor made it. Only a ``trusted`` file
    may hold more than tensors, and may then be the whole model, pickled. Raises ValueError where the file
    defines no such class, or more than one.
    """
    model_class = _find_model_class(_check_exists(model_file, "model file", "--model-file"))
    if weights is None:
        return model_class()
    read = FORMATS.get(weights.suffix, PICKLED).read_state
    if read is None:
        raise HandlerLoadError(
            f"{weights}: a {weights.suffix} file is a whole model, not weights for one. "
            "Archive it without --model-file."
        )
    state = read(_check_exists(weights, "weights file", "--serialized-file"), trusted)
    if isinstance(state, torch.nn.Module):
        return state
    model = model_class()
    try:
        model.load_state_dict(
            state, assign=weights.suffix == ".safetensors" and _has_same_types(model, state)
        )
    except (RuntimeError, TypeError, AttributeError) as error:
        raise HandlerLoadError(
            f"{weights}: this is no state dict of {model_class.__name__} in {model_file.name}: {error}. "
            "Save model.state_dict() of that very class."
        ) from error
    return model


def load(
    weights: Path | None,
    device: torch.device,
    trusted: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """Return the whole model that ``weights`` holds, on ``device``, for an archive without a modelFile.

    Only a ``trusted`` file may run code as it is read. ``config`` is the archive's model-config.yaml, whose
    ``onnx`` selects the execution providers of a graph.
    """
    if weights is None:
        raise HandlerLoadError(
            "No model weights could be loaded: the manifest names neither serializedFile nor modelFile. "
            "Archive the model with --serialized-file, --model-file or both."
        )
    read = FORMATS.get(weights.suffix, PICKLED).read_model
    if read is None:
        whole = ", ".join(suffix for suffix, entry in FORMATS.items() if entry.read_model is not None)
        raise HandlerLoadError(
            f"{weights}: No model weights could be loaded: the tensors in it need the class that they "
            "belong to. Archive the model with --model-file model.py, or as a file that holds the whole "
            f"model ({whole})."
        )
    file = _check_exists(weights, "weights file", "--serialized-file")
    return read(file, device, trusted, config)


def load_torchscript(
    weights: Path, device: torch.device, trusted: bool = False, config: Mapping[str, Any] | None = None
) -> torch.jit.ScriptModule:
    """Return a TorchScript model on ``device``."""
    _check_exists(weights, "weights file", "--serialized-file")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`torch\.jit\.load` is deprecated", DeprecationWarning)
            return torch.jit.load(str(weights), map_location=device)
    except RuntimeError as error:
        if "PytorchStreamReader" not in str(error):
            raise
        raise HandlerLoadError(f"{weights}: {pickle_scan.NOT_TORCHSCRIPT}") from error


def load_exported(
    weights: Path, device: torch.device, trusted: bool, config: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return a model that torch.export saved, or that AOTInductor compiled for this kind of device.

    The file's content decides which of the two it is.
    """
    if not trusted:
        raise HandlerLoadError(f"{weights}: {pickle_scan.PT2_NOT_TRUSTED}")
    try:
        with zipfile.ZipFile(weights) as file:
            compiled = [name for name in file.namelist() if "/data/aotinductor/" in name]
            metadata = [
                json.loads(file.read(name)) for name in compiled if name.endswith("wrapper_metadata.json")
            ]
        if not compiled:
            return _load_program(weights, device)
        return _load_compiled(weights, device, {entry["AOTI_DEVICE_KEY"] for entry in metadata})
    except (MemoryError, HandlerLoadError):
        raise
    except Exception as error:  # damaged files raise many types of errors
        raise HandlerLoadError(
            f"{weights}: this cannot be read as what torch.export.save or AOTInductor "
            f"(torch._inductor.aoti_compile_and_package) wrote: {error}. It is damaged, or of another "
            f"version of PyTorch than {torch.__version__}: export the model again with that."
        ) from error


def _load_program(weights: Path, device: torch.device) -> torch.nn.Module:
    program = torch.export.load(weights)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    module = program.module()
    module.eval = lambda: module  # its mode is fixed, and its own eval() raises
    module.training = False
    return module


def _load_compiled(weights: Path, device: torch.device, targets: set[str]) -> Callable[..., Any]:
    from torch._inductor import aoti_load_package

    if targets - {device.type}:
        raise HandlerLoadError(
            f"{weights}: AOTInductor compiled this for {', '.join(sorted(targets))}, and it is to run on "
            f"{device}. "
            f"Compile it for {device.type}, or change what the model claims (num_gpus in model-config.yaml)."
        )
    model = aoti_load_package(str(weights), device_index=-1 if device.index is None else device.index)
    model.input_dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}.get(
        model.get_metadata().get(DTYPE_METADATA_KEY, "")
    )
    return model


def load_onnx(
    weights: Path, device: torch.device, trusted: bool = False, config: Mapping[str, Any] | None = None
) -> Any:
    """Return an ONNX graph in ONNX Runtime, as ``handlers.onnx_model.OnnxModel``."""
    try:
        from handlers.onnx_model import OnnxModel  # imported late: few models need ONNX Runtime
    except ModuleNotFoundError as error:
        raise HandlerLoadError(format_import_error(str(weights), error)) from error

    return OnnxModel(weights, device, config)


class WeightsFormat(NamedTuple):
    """The readers of files of one suffix; None where the format cannot hold a state dict or a model."""

    read_state: Callable[[Path, bool], Mapping[str, torch.Tensor]] | None  # with a modelFile; (path, trusted)
    # without one; (path, device, trusted, model-config.yaml)
    read_model: Callable[[Path, torch.device, bool, Mapping[str, Any] | None], Any] | None


def _has_same_types(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a state dict has the number formats of the model, and can take the place of its tensors.

    Tensors of a safetensors file are mapped from it: replicas share their pages, and nothing is copied.
    """
    own = model.state_dict()
    return own.keys() == state.keys() and all(state[name].dtype == own[name].dtype for name in own)


def _read_state_dict(weights: Path, trusted: bool) -> Mapping[str, torch.Tensor]:
    try:
        return torch.load(weights, map_location="cpu", weights_only=not trusted)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes raise many types of errors
        raise HandlerLoadError(
            f"{weights}: this cannot be read as a state dict: it is damaged, or holds more than tensors. "
            f"{pickle_scan.NOT_TRUSTED_HINT}"
        ) from error


def _read_safetensors(weights: Path, trusted: bool) -> Mapping[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(weights)
    except SafetensorError as error:
        raise HandlerLoadError(
            f"{weights}: this is no safetensors file: {error}. Write it with safetensors.torch.save_file."
        ) from error


PICKLED = WeightsFormat(_read_state_dict, None)  # files with any other suffix are read as torch.save's

FORMATS: dict[str, WeightsFormat] = {
    ".onnx": WeightsFormat(None, load_onnx),
    ".pt": WeightsFormat(_read_state_dict, load_torchscript),
    ".pt2": WeightsFormat(None, load_exported),
    ".safetensors": WeightsFormat(_read_safetensors, None),
}


def _find_model_class(model_file: Path) -> type[torch.nn.Module]:
    classes = list_classes_from_module(load_module(model_file), torch.nn.Module)
    if len(classes) != 1:
        names = f" ({', '.join(cls.__name__ for cls in classes)})" if classes else ""
        raise ValueError(
            f"{model_file}: {len(classes)} nn.Module classes are defined in it{names}, and there must be "
            "exactly one: the model's. Keep it there and import its parts from another file of the archive "
            "(--extra-files)."
        )
    return classes[0]


def _check_exists(file: Path, what: str, option: str) -> Path:
    if not file.is_file():
        raise HandlerLoadError(
            f"{file}: the {what} that the manifest names is not in the archive. "
            f"Archive the model again with {option} {file.name}."
        )
    return file
