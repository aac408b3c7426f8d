"""The accuracy gate of an optimized model: its outputs for sample inputs must be within a tolerance."""

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
from handlers.optimize.task_metric import TaskMetric, predicted_classes

# The inputs of one call: a tensor, or tensors by the names of forward's arguments; each row is a sample.
Inputs = Any
_KEYS = ("samples", "rtol", "atol", "cosine", "metric", "labels", "max_drop")


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference of outputs; None disables a limit.

    ``|optimized - plain| <= atol + rtol * |plain|`` holds for every number, and the cosine similarity of
    every row is at least ``cosine``.
    """

    rtol: float | None = None
    atol: float | None = None
    cosine: float | None = None

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> Tolerance:
        """Parse ``accuracy:``; rtol and atol are both 0.01 by default, and unlimited beside a metric.

        Raises HandlerLoadError.
        """
        has_metric = values.get("metric") is not None
        values = {key: _to_number(values.get(key)) for key in ("rtol", "atol", "cosine")}
        for key in ("rtol", "atol", "cosine"):
            value = values.get(key)
            maximum = 1 if key == "cosine" else math.inf
            if value is not None and (type(value) not in (int, float) or not 0 <= value <= maximum):
                raise HandlerLoadError(
                    f"model-config.yaml: accuracy.{key} is {value!r}; write a number from 0."
                )
        if all(values.get(key) is None for key in ("rtol", "atol", "cosine")):
            return cls() if has_metric else cls(0.01, 0.01)
        rtol, atol = values.get("rtol"), values.get("atol")
        if (rtol is None) != (atol is None):  # one of the two defaults to 0
            rtol, atol = rtol or 0.0, atol or 0.0
        return cls(rtol, atol, values.get("cosine"))

    def __str__(self) -> str:
        return ", ".join(f"{key} {value:g}" for key, value in vars(self).items() if value is not None)


@dataclass(frozen=True)
class OutputDifference:
    """The comparison of two outputs.

    ``max_difference`` of two numbers is infinite where one is not finite; ``min_cosine`` is the lowest
    similarity of two rows. ``violation`` describes the first number outside of the tolerance, "" without one.
    """

    max_difference: float
    min_cosine: float
    violation: str = ""

    @property
    def is_within_tolerance(self) -> bool:
        return not self.violation


def compare_outputs(plain: Any, optimized: Any, tolerance: Tolerance) -> OutputDifference:
    """Compare the tensors of two models' outputs, of any structure, in their order."""
    before, after = output_tensors(plain), output_tensors(optimized)
    shapes = [tuple(t.shape) for t in before], [tuple(t.shape) for t in after]
    if shapes[0] != shapes[1]:
        return OutputDifference(math.inf, 0.0, f"the outputs' shapes are {shapes[1]} instead of {shapes[0]}")
    max_difference, min_cosine, violation = 0.0, 1.0, ""
    for index, (old, new) in enumerate(zip(before, after)):
        if not old.numel():
            continue
        old, new = old.detach().double().cpu(), new.detach().double().cpu()
        differences = torch.where((old == new) | (old.isnan() & new.isnan()), 0.0, (new - old).abs())
        differences = differences.nan_to_num(math.inf, math.inf)
        max_difference = max(max_difference, differences.max().item())
        if tolerance.rtol is not None and tolerance.atol is not None and not violation:
            allowed = tolerance.atol + tolerance.rtol * old.abs().nan_to_num(0, 0)
            violation = _describe_violation(index, old, new, differences - allowed)
        if old.dim() and old.is_floating_point():
            rows = (t.reshape(len(t), -1) if t.dim() > 1 else t[None] for t in (old, new))
            min_cosine = min(min_cosine, _min_cosine(*rows))
    if tolerance.cosine is not None and min_cosine < tolerance.cosine and not violation:
        violation = f"the cosine of a row is {min_cosine:.6g}"
    return OutputDifference(max_difference, min_cosine, violation)


def _describe_violation(index: int, old: torch.Tensor, new: torch.Tensor, excess: torch.Tensor) -> str:
    outside = excess > 0
    if not outside.any():
        return ""
    position = int(excess.argmax())
    indices = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(position), old.shape))
    values = f"{new.flatten()[position].item():.6g} instead of {old.flatten()[position].item():.6g}"
    count = f"{int(outside.sum())} of {outside.numel()} numbers"
    return f"output {index}[{indices}] is {values} ({count} are outside)"


def output_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output in their order; numpy arrays are converted."""
    leaves = (
        torch.from_numpy(leaf) if type(leaf).__module__ == "numpy" and leaf.ndim else leaf
        for leaf in pytree.tree_leaves(output)
    )
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class ToleranceGate:
    """The ``accuracy:`` block of model-config.yaml: sample inputs of the archive, and a tolerance."""

    def __init__(
        self,
        file: str,
        inputs: Inputs,
        tolerance: Tolerance,
        metric: TaskMetric | None = None,
        labels: Sequence[Any] = (),
    ) -> None:
        self.inputs = inputs
        self.tolerance = tolerance
        self._metric = metric
        self._labels = labels
        self._file = file
        self._reference: Any = None

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        directory: Path,
        device: torch.device,
        input_dtype: Callable[[torch.Tensor], torch.dtype],
    ) -> ToleranceGate | None:
        """Parse model-config.yaml and load the samples; return None without the key.

        ``input_dtype`` returns the model's number format for the tensor of a JSON list. Raises
        HandlerLoadError.
        """
        block = config.get("accuracy")
        if block is None:
            return None
        if not isinstance(block, Mapping) or not isinstance(block.get("samples"), str):
            raise HandlerLoadError(
                f"model-config.yaml: accuracy is {block!r}; write {{samples: FILE, rtol: 0.01, atol: 0.01}}, "
                f"where "
                "FILE is a file of the archive with sample inputs of the model."
            )
        for key in block:
            if key not in _KEYS:
                matches = difflib.get_close_matches(str(key), _KEYS, 1)
                hint = f"did you mean {matches[0]!r}?" if matches else f"there are {', '.join(_KEYS)}."
                raise HandlerLoadError(f"model-config.yaml: accuracy has no key {key!r}; {hint}")
        name = block["samples"]
        inputs = _load_samples(_archive_file(directory, name), input_dtype)
        metric = TaskMetric.from_config(block)
        labels: list[Any] = []
        if metric is not None:
            inputs, labels = _split_labels(inputs, block.get("labels"), directory, name)
        inputs = pytree.tree_map(lambda tensor: tensor.to(device), inputs)
        return cls(name, inputs, Tolerance.from_config(block), metric, labels)

    def _evaluate(self, output: Any) -> float:
        """Return the metric of a model's first output that has a row for each label."""
        assert self._metric is not None
        for tensor in output_tensors(output):
            if tensor.dim() and len(tensor) == len(self._labels):
                return self._metric.evaluate(predicted_classes(tensor), self._labels)
        raise HandlerLoadError("model-config.yaml: accuracy.metric: no output has a row for each label.")

    def record_reference(self, model: Any) -> None:
        """Store the plain ``model``'s outputs for the samples."""
        self._reference = run_model(model, self.inputs)

    def check(self, model: Any, options: object) -> OutputDifference:
        """Compare the optimized ``model``; raise HandlerLoadError where it is outside of the tolerance."""
        output = run_model(model, self.inputs)
        difference = compare_outputs(self._reference, output, self.tolerance)
        if self._metric is not None:
            plain, optimized = (self._evaluate(found) for found in (self._reference, output))
            if violation := self._metric.find_violation(plain, optimized):
                raise HandlerLoadError(
                    f"model-config.yaml: with optimize: {options} the model loses accuracy on {self._file}: "
                    f"{violation}. Take that option out of optimize, or raise accuracy.max_drop."
                )
        if not difference.is_within_tolerance:
            raise HandlerLoadError(
                f"model-config.yaml: with optimize: {options} the model is outside of accuracy "
                f"({self.tolerance}) on "
                f"{self._file}: {difference.violation}; the largest difference is "
                f"{difference.max_difference:.3g}, the lowest cosine "
                f"{difference.min_cosine:.5f}. Take that option out of optimize, or allow more under "
                "accuracy."
            )
        return difference


def _split_labels(inputs: Inputs, file: Any, directory: Path, samples: str) -> tuple[Inputs, list[Any]]:
    """Return the inputs without labels, and the class of each row.

    The labels are those of the JSON list in the archive's ``file``, or the samples' own entry ``labels``.
    """
    if file is not None:
        try:
            labels = json.loads(_archive_file(directory, str(file)).read_bytes())
        except ValueError as error:
            raise HandlerLoadError(f"{file}: the labels are not JSON: {error}") from error
    else:
        own = inputs.get("labels") if isinstance(inputs, Mapping) else None
        labels = own.tolist() if own is not None else None
        if own is not None:
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
    rows = len(next(iter(inputs.values())) if isinstance(inputs, Mapping) and inputs else inputs)
    if not isinstance(labels, list) or len(labels) != rows:
        raise HandlerLoadError(
            f"model-config.yaml: accuracy.metric needs the class of each of the {rows} rows of {samples}: a "
            "JSON list in a file of the archive that accuracy.labels names, or labels beside the inputs."
        )
    return inputs, labels


def _to_number(value: Any) -> Any:
    """Parse a number that YAML read as a text: 1e-6 has no decimal point."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _min_cosine(old: torch.Tensor, new: torch.Tensor) -> float:
    """Return the lowest cosine similarity of their rows: 1 for two rows of zeros, 0 for one with a NaN."""
    lengths = old.norm(dim=1) * new.norm(dim=1)
    cosines = torch.where(
        lengths > 0, (old * new).sum(1) / lengths.clamp_min(1e-300), (old == new).all(1).double()
    )
    return cosines.nan_to_num(0.0).clamp(-1, 1).min().item()


def run_model(model: Any, inputs: Inputs) -> Any:
    """Return the output of ``model`` for ``inputs``, without gradients."""
    with torch.inference_mode():
        return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def take_rows(inputs: Inputs, count: int) -> Inputs:
    """Return ``count`` rows of ``inputs``, repeated from the first where there are fewer."""
    return pytree.tree_map(
        lambda tensor: tensor[torch.arange(count, device=tensor.device) % len(tensor)], inputs
    )


def _archive_file(directory: Path, name: str) -> Path:
    file = (directory / name).resolve()
    if not file.is_file() or not file.is_relative_to(directory.resolve()):
        raise HandlerLoadError(
            f"model-config.yaml: accuracy.samples names {name!r}, which is not in the archive. Pack it with "
            "--extra-files, or mend its name."
        )
    return file


def _load_samples(file: Path, input_dtype: Callable[[torch.Tensor], torch.dtype]) -> Inputs:
    try:
        if file.suffix == ".json":
            inputs = _stack_rows(json.loads(file.read_bytes()), input_dtype)
        elif file.suffix == ".safetensors":
            from safetensors.torch import load_file

            inputs = load_file(file)
        else:
            inputs = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # each loader has its own errors
        raise HandlerLoadError(f"{file.name}: the samples cannot be read: {error}. {_FORMATS}") from error
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    if not tensors or not all(isinstance(value, torch.Tensor) and value.dim() for value in tensors):
        raise HandlerLoadError(f"{file.name}: these are no sample inputs. {_FORMATS}")
    if len({len(value) for value in tensors}) > 1 or not len(tensors[0]):
        raise HandlerLoadError(
            f"{file.name}: every tensor must have the same number of rows, at least one. {_FORMATS}"
        )
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _stack_rows(rows: Any, input_dtype: Callable[[torch.Tensor], torch.dtype]) -> Inputs:
    if not isinstance(rows, Sequence) or not rows or isinstance(rows, str):
        raise ValueError("it is no list of rows")
    if isinstance(rows[0], Mapping):
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    tensor = torch.tensor(rows)
    return tensor.to(input_dtype(tensor))


_FORMATS = (
    "Write a JSON list with one row of the model's input each (a list of numbers, or an object of the "
    "arguments of "
    "forward), all of one shape; or tensors with a row each, by torch.save or as safetensors."
)
