"""The gate before an optimised model: on sample inputs its outputs are the plain model's, within a tolerance."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from handlers.errors import HandlerLoadError

Inputs = Any  # of one call: a tensor, or a dict of tensors by the names of forward's arguments; a row of each a sample
_KEYS = ("samples", "rtol", "atol", "cosine")


@dataclass(frozen=True)
class Tolerance:
    """How far outputs may go: ``|optimised - plain| <= atol + rtol * |plain|`` for every number, and ``cosine`` at
    least for every row. None: not asked for."""

    rtol: float | None = None
    atol: float | None = None
    cosine: float | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Tolerance:
        """From ``accuracy:``; without a word rtol and atol are 0.01 both. Raises HandlerLoadError."""
        values = {key: _number(value) for key, value in values.items()}
        for key in ("rtol", "atol", "cosine"):
            value = values.get(key)
            most = 1 if key == "cosine" else math.inf
            if value is not None and (type(value) not in (int, float) or not 0 <= value <= most):
                raise HandlerLoadError(f"model-config.yaml: accuracy.{key} is {value!r}; write a number from 0.")
        if all(values.get(key) is None for key in ("rtol", "atol", "cosine")):
            return cls(0.01, 0.01)
        rtol, atol = values.get("rtol"), values.get("atol")
        if (rtol is None) != (atol is None):  # the other one is none
            rtol, atol = rtol or 0.0, atol or 0.0
        return cls(rtol, atol, values.get("cosine"))

    def __str__(self) -> str:
        said = (f"{key} {value:g}" for key, value in vars(self).items() if value is not None)
        return ", ".join(said)


@dataclass(frozen=True)
class Difference:
    """Of two outputs: the largest difference between two numbers (infinite where one is none), the lowest cosine of
    two rows, and the first number that is out of the tolerance, in words; "" where all are within."""

    largest: float
    cosine: float
    outside: str = ""

    @property
    def within(self) -> bool:
        return not self.outside


def difference(plain: Any, optimised: Any, tolerance: Tolerance) -> Difference:
    """How far ``optimised`` is from ``plain``: each whatever a model gives, its tensors compared in their order."""
    before, after = tensors(plain), tensors(optimised)
    shapes = [tuple(t.shape) for t in before], [tuple(t.shape) for t in after]
    if shapes[0] != shapes[1]:
        return Difference(math.inf, 0.0, f"the outputs' shapes are {shapes[1]} instead of {shapes[0]}")
    largest, cosine, outside = 0.0, 1.0, ""
    for index, (old, new) in enumerate(zip(before, after)):
        if not old.numel():
            continue
        old, new = old.detach().double().cpu(), new.detach().double().cpu()
        apart = torch.where((old == new) | (old.isnan() & new.isnan()), 0.0, (new - old).abs())
        apart = apart.nan_to_num(math.inf, math.inf)
        largest = max(largest, apart.max().item())
        if tolerance.rtol is not None and tolerance.atol is not None and not outside:
            allowed = tolerance.atol + tolerance.rtol * old.abs().nan_to_num(0, 0)
            wrong = (apart > allowed).flatten()
            if wrong.any():
                place = int((apart - allowed).flatten().argmax())
                where = "[" + ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(place), old.shape)) + "]"
                values = new.flatten()[place].item(), old.flatten()[place].item()
                count = f"{int(wrong.sum())} of {wrong.numel()} numbers"
                outside = f"output {index}{where} is {values[0]:.6g} instead of {values[1]:.6g} ({count} are outside)"
        rows = (old.reshape(len(old), -1), new.reshape(len(new), -1)) if old.dim() > 1 else (old[None], new[None])
        if old.dim() and old.is_floating_point():
            cosine = min(cosine, _cosine(*rows))
    if tolerance.cosine is not None and cosine < tolerance.cosine and not outside:
        outside = f"the cosine of a row is {cosine:.6g}"
    return Difference(largest, cosine, outside)


def tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in what a model gives, in their order; numpy's arrays count."""
    leaves = pytree.tree_leaves(output)
    made = (torch.from_numpy(leaf) if type(leaf).__module__ == "numpy" and leaf.ndim else leaf for leaf in leaves)
    return [leaf for leaf in made if isinstance(leaf, torch.Tensor)]


class Gate:
    """``accuracy:`` of model-config.yaml: sample inputs of the archive, and a tolerance."""

    def __init__(self, file: str, inputs: Inputs, tolerance: Tolerance) -> None:
        self.inputs = inputs
        self.tolerance = tolerance
        self._file = file
        self._plain: Any = None

    @classmethod
    def read(cls, config: Mapping[str, Any], directory: Path, device: torch.device, floats: Callable) -> Gate | None:
        """None without the key. ``floats`` gives the number format that the model wants of a JSON list's tensor.
        Raises HandlerLoadError."""
        block = config.get("accuracy")
        if block is None:
            return None
        if not isinstance(block, Mapping) or not isinstance(block.get("samples"), str):
            raise HandlerLoadError(
                f"model-config.yaml: accuracy is {block!r}; write {{samples: FILE, rtol: 0.01, atol: 0.01}}, where "
                "FILE is a file of the archive with sample inputs of the model."
            )
        for key in block:
            if key not in _KEYS:
                near = difflib.get_close_matches(str(key), _KEYS, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_KEYS)}."
                raise HandlerLoadError(f"model-config.yaml: accuracy has no key {key!r}; {hint}")
        name = block["samples"]
        inputs = _read(_inside(directory, name), floats)
        inputs = pytree.tree_map(lambda tensor: tensor.to(device), inputs)
        return cls(name, inputs, Tolerance.of(block))

    def learn(self, model: Any) -> None:
        """Keep what the plain ``model`` makes of the samples."""
        self._plain = call(model, self.inputs)

    def check(self, model: Any, asked: object) -> Difference:
        """Compare ``model``, optimised as ``asked`` says. Raises HandlerLoadError where it is outside."""
        found = difference(self._plain, call(model, self.inputs), self.tolerance)
        if not found.within:
            raise HandlerLoadError(
                f"model-config.yaml: with optimize: {asked} the model is outside of accuracy ({self.tolerance}) on "
                f"{self._file}: {found.outside}; the largest difference is {found.largest:.3g}, the lowest cosine "
                f"{found.cosine:.5f}. Take that option out of optimize, or allow more under accuracy."
            )
        return found


def _number(value: Any) -> Any:
    """YAML takes 1e-6, which has no point, for a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _cosine(old: torch.Tensor, new: torch.Tensor) -> float:
    """The lowest of their rows; of two rows of zeros 1, of what is no number 0."""
    lengths = old.norm(dim=1) * new.norm(dim=1)
    found = torch.where(lengths > 0, (old * new).sum(1) / lengths.clamp_min(1e-300), (old == new).all(1).double())
    return found.nan_to_num(0.0).clamp(-1, 1).min().item()


def call(model: Any, inputs: Inputs) -> Any:
    """What ``model`` makes of ``inputs``, without gradients."""
    with torch.inference_mode():
        return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def rows(inputs: Inputs, count: int) -> Inputs:
    """``count`` rows of ``inputs``, from the first one again where there are fewer."""
    return pytree.tree_map(lambda tensor: tensor[torch.arange(count, device=tensor.device) % len(tensor)], inputs)


def _inside(directory: Path, name: str) -> Path:
    file = (directory / name).resolve()
    if not file.is_file() or not file.is_relative_to(directory.resolve()):
        raise HandlerLoadError(
            f"model-config.yaml: accuracy.samples names {name!r}, which is not in the archive. Pack it with "
            "--extra-files, or mend its name."
        )
    return file


def _read(file: Path, floats: Callable[[torch.Tensor], torch.dtype]) -> Inputs:
    try:
        if file.suffix == ".json":
            inputs = _of_rows(json.loads(file.read_bytes()), floats)
        elif file.suffix == ".safetensors":
            from safetensors.torch import load_file

            inputs = load_file(file)
        else:
            inputs = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # each reader has errors of its own
        raise HandlerLoadError(f"{file.name}: the samples cannot be read: {error}. {_WANTED}") from error
    held = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    if not held or not all(isinstance(value, torch.Tensor) and value.dim() for value in held):
        raise HandlerLoadError(f"{file.name}: these are no sample inputs. {_WANTED}")
    if len({len(value) for value in held}) > 1 or not len(held[0]):
        raise HandlerLoadError(f"{file.name}: every tensor must have the same number of rows, at least one. {_WANTED}")
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _of_rows(listed: Any, floats: Callable[[torch.Tensor], torch.dtype]) -> Inputs:
    if not isinstance(listed, Sequence) or not listed or isinstance(listed, str):
        raise ValueError("it is no list of rows")
    if isinstance(listed[0], Mapping):
        return {name: torch.tensor([row[name] for row in listed]) for name in listed[0]}
    tensor = torch.tensor(listed)
    return tensor.to(floats(tensor))


_WANTED = (
    "Write a JSON list with one row of the model's input each (a list of numbers, or an object of the arguments of "
    "forward), all of one shape; or tensors with a row each, by torch.save or as safetensors."
)
