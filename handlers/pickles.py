"""What can be told of a weights file without reading it: whether it is refused, or would run code. Needs no torch."""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

# Pickles of tensors name these, and whatever torch has for tensors and storages.
_OF_TENSORS = frozenset(
    (
        *("collections Counter", "collections OrderedDict", "_codecs encode"),
        *(f"{module} {name}" for module in ("builtins", "__builtin__") for name in ("bytearray", "complex", "set")),
    )
)
NO_TORCHSCRIPT = (
    "this is no TorchScript model. For a state dict, add the file of the model's class (--model-file model.py); else "
    "save the model with torch.jit.save."
)
RUNS_AS_IT_IS_READ = (
    "a .pt2 file holds pickles, expressions or machine code that run as it is read. If you trust it, write "
    "trusted: true in model-config.yaml; else archive an .onnx file, or the class and its state dict."
)
CURE = (
    "Save model.state_dict(); or, if you trust the file to run code as it loads, write trusted: true in "
    "model-config.yaml."
)
_MOST = 16 * 2**20  # bytes of a pickle that is looked through: its tensors lie beside it


def refusal(weights: Path, with_class: bool, trusted: bool) -> str | None:
    """Why BaseHandler will not load this file, with the cure; None where only loading tells.

    ``with_class``: the archive has a model file, so that the weights are a state dict. What is said is certain:
    a file in a form that is not known here is left to torch.
    """
    if weights.suffix == ".pt2" and not with_class and not trusted:
        return RUNS_AS_IT_IS_READ
    if weights.suffix in (".onnx", ".pt2", ".safetensors", ".so"):
        return None
    names, pickle = _content(weights)
    if pickle is None:
        return None
    if not with_class and weights.suffix == ".pt" and "constants.pkl" not in names:
        return NO_TORCHSCRIPT
    if trusted or not with_class:
        return None
    strange = sorted(foreign(pickle))
    if not strange:
        return None
    named = ", ".join(strange[:3]) + " ..." * (len(strange) > 3)
    return f"it holds more than tensors: reading it runs {named}. {CURE}"


def foreign(pickle: bytes) -> set[str]:
    """The classes and functions that this pickle names, and that no pickle of tensors does."""
    found = set()
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            if opcode.name in ("GLOBAL", "INST"):
                module = argument.partition(" ")[0]
                torchs = module.partition(".")[0] == "torch" and not module.startswith("torch.nn.modules")
                if not torchs and argument not in _OF_TENSORS:
                    found.add(argument.replace(" ", "."))
    except Exception:  # damaged pickles fail in as many ways as there are opcodes, and loading says how
        return set()
    return found


def _content(weights: Path) -> tuple[set[str], bytes | None]:
    """The names in the file's top folder, and its pickle, where it is what torch.save or torch.jit.save wrote."""
    try:
        with zipfile.ZipFile(weights) as file:
            inside = {name.partition("/")[2]: name for name in file.namelist()}
            info = file.getinfo(inside["data.pkl"])
            return set(inside), file.read(info) if info.file_size <= _MOST else None
    except (OSError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile, NotImplementedError):
        return set(), None
