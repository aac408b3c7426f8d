"""Which pixels of an image belong together."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from handlers.errors import PredictionException
from handlers.tasks.base import FRACTION, Example, ImageTask, one_of

_KINDS = ("panoptic", "instance", "semantic")


class ImageSegmentation(ImageTask):
    """``[{"score", "label", "mask"}]``: each mask a PNG in base64, as large as the image, white where the label holds.

    Panoptic segments where the model has them, else instances, else classes (their score is None), or what
    ``subtask`` says: panoptic, instance or semantic. ``threshold`` (0.9), ``mask_threshold`` and
    ``overlap_mask_area_threshold`` (0.5) are for the first two.
    """

    parameters = {
        "threshold": FRACTION,
        "mask_threshold": FRACTION,
        "overlap_mask_area_threshold": FRACTION,
        "subtask": one_of(*_KINDS),
    }

    @classmethod
    def model_class(cls, config: Any) -> str:
        name = (config.architectures or [""])[0]
        for kind in ("UniversalSegmentation", "InstanceSegmentation", "SemanticSegmentation"):
            if name.endswith(f"For{kind}"):
                return f"AutoModelFor{kind}"
        return "AutoModelForImageSegmentation"

    def scores(self, output: Any) -> torch.Tensor:
        """The mean probability of each label over the pixels, or that of each label's surest segment."""
        if "class_queries_logits" in output:
            return output.class_queries_logits.softmax(-1).amax(1)
        return output.logits.softmax(1).mean((2, 3))

    def read(self, row: Any) -> Example:
        example = super().read(row)
        kind = example.parameters.get("subtask")
        if kind is not None and self._function(kind) is None:
            able = ", ".join(other for other in _KINDS if self._function(other) is not None)
            raise PredictionException(f"This model has no {kind} segments; the subtask may be {able}.", 400)
        return example

    def answers(self, output: Any, encoded: Any, examples: Sequence[Example]) -> list[Any]:
        first = next(kind for kind in _KINDS if self._function(kind) is not None)
        return [
            self._answer(example.parameters.get("subtask", first), _one(output, row), size, example)
            for row, (size, example) in enumerate(zip(self.sizes(examples), examples))
        ]

    def _function(self, kind: str) -> Any:
        """What makes such segments of a model's output."""
        return getattr(self.processor, f"post_process_{kind}_segmentation", None)

    def _answer(self, kind: str, output: Any, size: tuple[int, int], example: Example) -> list[dict[str, Any]]:
        if kind == "semantic":
            [found] = self._function(kind)(output, target_sizes=[size])
            return self._classes(found)
        limits = {"threshold": 0.9, "mask_threshold": 0.5, "overlap_mask_area_threshold": 0.5, **example.parameters}
        limits.pop("subtask", None)
        [found] = self._function(kind)(output, target_sizes=[size], **limits)
        return [
            {
                "score": segment["score"],
                "label": self.config.id2label[segment["label_id"]],
                "mask": _png(found["segmentation"] == segment["id"]),
            }
            for segment in found["segments_info"]
        ]

    def _classes(self, found: torch.Tensor) -> list[dict[str, Any]]:
        return [
            {"score": None, "label": self.config.id2label[label], "mask": _png(found == label)}
            for label in found.unique().tolist()
        ]


def _one(output: Any, row: int) -> Any:
    """One row of a model's output, as it would be in a batch of its own."""
    size = len(output.logits if "logits" in output else output.class_queries_logits)
    whole = {
        name: value[row : row + 1] if isinstance(value, torch.Tensor) and value.dim() and len(value) == size else value
        for name, value in output.items()
    }
    return type(output)(**whole)


def _png(mask: torch.Tensor) -> str:
    file = io.BytesIO()
    Image.fromarray((mask.cpu().numpy() * 255).astype("uint8"), mode="L").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
