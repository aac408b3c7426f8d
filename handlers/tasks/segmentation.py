"""Which pixels of an image belong together."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from handlers.tasks.base import FRACTION, Example, ImageTask


class ImageSegmentation(ImageTask):
    """``[{"score", "label", "mask"}]``: each mask a PNG in base64, as large as the image, white where the label holds.

    Panoptic segments where the model has them, else instances, else classes (their score is None).
    ``threshold`` (0.9), ``mask_threshold`` and ``overlap_mask_area_threshold`` (0.5) are for the first two.
    """

    parameters = {"threshold": FRACTION, "mask_threshold": FRACTION, "overlap_mask_area_threshold": FRACTION}

    @classmethod
    def model_class(cls, config: Any) -> str:
        name = (config.architectures or [""])[0]
        for kind in ("UniversalSegmentation", "InstanceSegmentation", "SemanticSegmentation"):
            if name.endswith(f"For{kind}"):
                return f"AutoModelFor{kind}"
        return "AutoModelForImageSegmentation"

    def answers(self, output: Any, encoded: Any, examples: Sequence[Example]) -> list[Any]:
        sizes = self.sizes(examples)
        for kind in ("panoptic", "instance"):
            if function := getattr(self.processor, f"post_process_{kind}_segmentation", None):
                return [
                    self._segments(function, _one(output, row), size, example)
                    for row, (size, example) in enumerate(zip(sizes, examples))
                ]
        return [self._classes(found) for found in self.processor.post_process_semantic_segmentation(output, sizes)]

    def _segments(self, function: Any, output: Any, size: tuple[int, int], example: Example) -> list[dict[str, Any]]:
        limits = {"threshold": 0.9, "mask_threshold": 0.5, "overlap_mask_area_threshold": 0.5, **example.parameters}
        [found] = function(output, target_sizes=[size], **limits)
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
