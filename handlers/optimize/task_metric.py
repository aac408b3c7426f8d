"""Task metrics of an optimized model on labelled samples: accuracy and F1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from handlers.errors import HandlerLoadError

DEFAULT_MAX_DROP = 0.01


def accuracy(predicted: Sequence[Any], labels: Sequence[Any]) -> float:
    """Return the share of rows whose prediction is their label."""
    return sum(map(_equal, predicted, labels)) / len(labels)


def macro_f1(predicted: Sequence[Any], labels: Sequence[Any]) -> float:
    """Return the mean of the F1 scores of all labels."""
    scores = []
    for label in dict.fromkeys(labels):
        pairs = [(_equal(p, label), _equal(t, label)) for p, t in zip(predicted, labels)]
        hits, wrong = sum(p and t for p, t in pairs), sum(p != t for p, t in pairs)
        scores.append(2 * hits / (2 * hits + wrong))
    return sum(scores) / len(scores)


METRICS: dict[str, Callable[[Sequence[Any], Sequence[Any]], float]] = {"accuracy": accuracy, "f1": macro_f1}


@dataclass(frozen=True)
class TaskMetric:
    """A metric that an optimized model may lower by at most ``max_drop``."""

    name: str
    max_drop: float = DEFAULT_MAX_DROP

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> TaskMetric | None:
        """Parse ``accuracy.metric`` and ``accuracy.max_drop``; return None without a metric.

        Raises HandlerLoadError.
        """
        name, max_drop = values.get("metric"), values.get("max_drop")
        if name is None:
            if max_drop is not None:
                raise _error("max_drop", max_drop, "it with a metric")
            return None
        if name not in METRICS:
            raise _error("metric", name, " or ".join(METRICS))
        max_drop = DEFAULT_MAX_DROP if max_drop is None else max_drop
        if type(max_drop) not in (int, float) or not 0 <= max_drop <= 1:
            raise _error("max_drop", max_drop, "a number from 0 to 1")
        return cls(name, float(max_drop))

    def evaluate(self, predicted: Sequence[Any], labels: Sequence[Any]) -> float:
        return METRICS[self.name](predicted, labels)

    def find_violation(self, plain: float, optimized: float) -> str:
        """Return a description of a loss beyond the limit, "" without one."""
        if plain - optimized <= self.max_drop + 1e-9:
            return ""
        return f"{self.name} is {optimized:.4g} instead of {plain:.4g}, and may drop by {self.max_drop:g}"


def predicted_classes(output: torch.Tensor) -> list[Any]:
    """Return the class of each row: the index of the largest number, or the number itself."""
    return (output.argmax(-1) if output.dim() > 1 else output).flatten().tolist()


def predicted_label(answer: Any) -> Any:
    """Return the label in a handler's answer.

    It is the ``label`` of an object, the label with the highest score in a list or an object of scores, the
    index of the largest number in a list, or the answer itself.
    """
    if isinstance(answer, torch.Tensor) or hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, Mapping):
        if "label" in answer:
            return answer["label"]
        numbers = {key: value for key, value in answer.items() if isinstance(value, (int, float))}
        return max(numbers, key=lambda key: numbers[key]) if numbers else None
    if isinstance(answer, list) and answer:
        if all(isinstance(item, Mapping) and "label" in item for item in answer):
            return max(answer, key=lambda item: item.get("score", 0))["label"]
        if all(isinstance(item, (int, float)) for item in answer):
            return answer.index(max(answer))
    return answer


def _equal(predicted: Any, label: Any) -> bool:
    """Compare as texts too: JSON's keys are texts, and labels may be numbers."""
    return bool(predicted == label) or str(predicted) == str(label)


def _error(key: str, value: Any, expected: str) -> HandlerLoadError:
    return HandlerLoadError(f"model-config.yaml: accuracy.{key} is {value!r}; write {expected}.")
