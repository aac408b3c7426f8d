"""Image segmentation: panoptic, instance and semantic."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from handlers.errors import PredictionException
from handlers.tasks.base import FRACTION, ImageTask, TaskInput, one_of

_SUBTASKS = ("panoptic", "instance", "semantic")


class ImageSegmentation(ImageTask):
    """A task that answers ``[{"score", "label", "mask"}]``.

    A mask is a PNG in base64 of the image's size, white where the label applies. ``subtask`` is panoptic,
    instance or semantic (whose score is None); the default is the first of them that the model supports.
    ``threshold`` (0.9), ``mask_threshold`` and ``overlap_mask_area_threshold`` (0.5) apply to the first two.
    """

    parameters = {
        "threshold": FRACTION,
        "mask_threshold": FRACTION,
        "overlap_mask_area_threshold": FRACTION,
        "subtask": one_of(*_SUBTASKS),
    }

    @classmethod
    def model_class(cls, config: Any) -> str:
        name = (config.architectures or [""])[0]
        for kind in ("UniversalSegmentation", "InstanceSegmentation", "SemanticSegmentation"):
            if name.endswith(f"For{kind}"):
                return f"AutoModelFor{kind}"
        return "AutoModelForImageSegmentation"

    def label_scores(self, output: Any) -> torch.Tensor:
        """Return each label's mean probability over the pixels, or that of its most probable segment."""
        if "class_queries_logits" in output:
            return output.class_queries_logits.softmax(-1).amax(1)
        return output.logits.softmax(1).mean((2, 3))

    def parse(self, row: Any) -> TaskInput:
        example = super().parse(row)
        subtask = example.parameters.get("subtask")
        if subtask is not None and self._postprocessor(subtask) is None:
            supported = ", ".join(name for name in _SUBTASKS if self._postprocessor(name) is not None)
            raise PredictionException(
                f"This model has no {subtask} segments; the subtask may be {supported}.", 400
            )
        return example

    def postprocess(self, output: Any, encoded: Any, examples: Sequence[TaskInput]) -> list[Any]:
        default = next(name for name in _SUBTASKS if self._postprocessor(name) is not None)
        return [
            self._segments(
                example.parameters.get("subtask", default), _row_output(output, row), size, example
            )
            for row, (size, example) in enumerate(zip(self.image_sizes(examples), examples))
        ]

    def _postprocessor(self, subtask: str) -> Any:
        """Return the processor's method for a subtask; None without one."""
        return getattr(self.processor, f"post_process_{subtask}_segmentation", None)

    def _segments(
        self, subtask: str, output: Any, size: tuple[int, int], example: TaskInput
    ) -> list[dict[str, Any]]:
        if subtask == "semantic":
            [label_map] = self._postprocessor(subtask)(output, target_sizes=[size])
            return self._classes(label_map)
        thresholds = {
            "threshold": 0.9,
            "mask_threshold": 0.5,
            "overlap_mask_area_threshold": 0.5,
            **example.parameters,
        }
        thresholds.pop("subtask", None)
        [result] = self._postprocessor(subtask)(output, target_sizes=[size], **thresholds)
        return [
            {
                "score": segment["score"],
                "label": self.config.id2label[segment["label_id"]],
                "mask": _encode_png(result["segmentation"] == segment["id"]),
            }
            for segment in result["segments_info"]
        ]

    def _classes(self, label_map: torch.Tensor) -> list[dict[str, Any]]:
        return [
            {"score": None, "label": self.config.id2label[label], "mask": _encode_png(label_map == label)}
            for label in label_map.unique().tolist()
        ]


def _row_output(output: Any, row: int) -> Any:
    """Return a row of a model's output as a batch of one."""
    size = len(output.logits if "logits" in output else output.class_queries_logits)
    values = {
        name: value[row : row + 1]
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == size
        else value
        for name, value in output.items()
    }
    return type(output)(**values)


def _encode_png(mask: torch.Tensor) -> str:
    file = io.BytesIO()
    Image.fromarray((mask.cpu().numpy() * 255).astype("uint8"), mode="L").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
