"""Object detection in images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from handlers.tasks.base import FRACTION, ImageTask, TaskInput

_SIDES = ("xmin", "ymin", "xmax", "ymax")


class ObjectDetection(ImageTask):
    """An object detector that answers ``[{"score", "label", "box": {"xmin", "ymin", "xmax", "ymax"}}]``.

    Boxes are in pixels; detections have a score above ``threshold`` (0.5).
    """

    auto_class = "AutoModelForObjectDetection"
    parameters = {"threshold": FRACTION}

    def label_scores(self, output: Any) -> torch.Tensor:
        """Return the probability of each label's most probable box."""
        return output.logits.softmax(-1).amax(1)

    def postprocess(self, output: Any, encoded: Any, examples: Sequence[TaskInput]) -> list[Any]:
        thresholds = [example.parameters.get("threshold", 0.5) for example in examples]
        detections = self.processor.post_process_object_detection(
            output, min(thresholds), self.image_sizes(examples)
        )
        return [
            [
                {"score": score, "label": self.config.id2label[label], "box": dict(zip(_SIDES, box))}
                for score, label, box in zip(
                    found["scores"].tolist(), found["labels"].tolist(), found["boxes"].int().tolist()
                )
                if score > threshold
            ]
            for found, threshold in zip(detections, thresholds)
        ]
