"""What stands where in an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from handlers.tasks.base import FRACTION, Example, ImageTask

_SIDES = ("xmin", "ymin", "xmax", "ymax")


class ObjectDetection(ImageTask):
    """``[{"score", "label", "box": {"xmin", "ymin", "xmax", "ymax"}}]`` in pixels, those above ``threshold`` (0.5)."""

    auto = "AutoModelForObjectDetection"
    parameters = {"threshold": FRACTION}

    def scores(self, output: Any) -> torch.Tensor:
        """The probability of each label's surest box."""
        return output.logits.softmax(-1).amax(1)

    def answers(self, output: Any, encoded: Any, examples: Sequence[Example]) -> list[Any]:
        least = [example.parameters.get("threshold", 0.5) for example in examples]
        found = self.processor.post_process_object_detection(output, min(least), self.sizes(examples))
        return [
            [
                {"score": score, "label": self.config.id2label[label], "box": dict(zip(_SIDES, box))}
                for score, label, box in zip(
                    one["scores"].tolist(), one["labels"].tolist(), one["boxes"].int().tolist()
                )
                if score > threshold
            ]
            for one, threshold in zip(found, least)
        ]
