"""Checks of a weights file that do not load it: whether it would be rejected or would run code.

This module does not import torch.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

from handlers.untrusted_files import open_zip

# Globals that pickles of tensors name, besides torch's own classes of tensors and storages.
_TENSOR_GLOBALS = frozenset(
    (
        *("collections Counter", "collections OrderedDict", "_codecs encode"),
        *(
            f"{module} {name}"
            for module in ("builtins", "__builtin__")
            for name in ("bytearray", "complex", "set")
        ),
    )
)
NOT_TORCHSCRIPT = (
    "this is no TorchScript model. For a state dict, add the file of the model's class (--model-file "
    "model.py); else save the model with torch.jit.save."
)
PT2_NOT_TRUSTED = (
    "a .pt2 file holds pickles, expressions or machine code that run as it is read. If you trust it, "
    "register the model with trusted=true, or name it in store.trusted; else archive an .onnx file, or the "
    "class and its state dict."
)
NOT_TRUSTED_HINT = (
    "Save model.state_dict(); or, if you trust the file to run code as it loads, register the model "
    "with trusted=true, or name it in store.trusted."
)
_MAX_ENTRIES = 100_000  # of a file of weights, which has one for each tensor
_MAX_PICKLE_BYTES = 16 * 2**20  # of a scanned pickle; tensors are stored beside it in the archive


def find_rejection_reason(weights: Path, has_model_file: bool, trusted: bool) -> str | None:
    """Return why BaseHandler would reject this file, with the remedy; None where only loading can show it.

    ``has_model_file`` means that the archive has a model file, so that the weights are a state dict. A reason
    is returned only where it is certain: files in unknown formats are left to torch.
    """
    if weights.suffix == ".pt2" and not has_model_file and not trusted:
        return PT2_NOT_TRUSTED
    if weights.suffix in (".onnx", ".pt2", ".safetensors", ".so"):
        return None
    names, pickle = _read_pickle(weights)
    if pickle is None:
        return None
    if not has_model_file and weights.suffix == ".pt" and "constants.pkl" not in names:
        return NOT_TORCHSCRIPT
    if trusted or not has_model_file:
        return None
    unsafe = sorted(find_unsafe_globals(pickle))
    if not unsafe:
        return None
    listed = ", ".join(unsafe[:3]) + " ..." * (len(unsafe) > 3)
    return f"it holds more than tensors: reading it runs {listed}. {NOT_TRUSTED_HINT}"


def find_unsafe_globals(pickle: bytes) -> set[str]:
    """Return the classes and functions that ``pickle`` names and that no pickle of tensors names."""
    unsafe = set()
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            if opcode.name in ("GLOBAL", "INST") and isinstance(argument, str):
                module = argument.partition(" ")[0]
                is_torch = module.partition(".")[0] == "torch" and not module.startswith("torch.nn.modules")
                if not is_torch and argument not in _TENSOR_GLOBALS:
                    unsafe.add(argument.replace(" ", "."))
    except Exception:  # damaged pickles raise many types; torch.load then reports the error
        return set()
    return unsafe


def _read_pickle(weights: Path) -> tuple[set[str], bytes | None]:
    """Return the names in the file's top folder, and its pickle where torch.save or torch.jit.save wrote the
    file.
    """
    try:
        with weights.open("rb") as source, open_zip(source, _MAX_ENTRIES) as file:
            members = {name.partition("/")[2]: name for name in file.namelist()}
            info = file.getinfo(members["data.pkl"])
            return set(members), file.read(info) if info.file_size <= _MAX_PICKLE_BYTES else None
    except (OSError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile, NotImplementedError):
        return set(), None
