"""Image segmentation: panoptic, instance and semantic."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from handlers.errors import PredictionException
from handlers.tasks.base import FRACTION, ImageTask, TaskInput, one_of

_SUBTASKS = ("panoptic", "instance", "semantic")
_MAX_SCORES = 2**28  # 1 GiB of float32: a score of each label or query for each pixel


class ImageSegmentation(ImageTask):
    """A task that answers ``[{"score", "label", "mask"}]``.

    A mask is a PNG in base64 of the image's size, white where the label applies; those of large images are
    computed at a lower resolution and enlarged. ``subtask`` is panoptic,
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
        target = _computed_size(output, size)
        if subtask == "semantic":
            [label_map] = self._postprocessor(subtask)(output, target_sizes=[target])
            return self._classes(_enlarge(label_map, size))
        thresholds = {
            "threshold": 0.9,
            "mask_threshold": 0.5,
            "overlap_mask_area_threshold": 0.5,
            **example.parameters,
        }
        thresholds.pop("subtask", None)
        [result] = self._postprocessor(subtask)(output, target_sizes=[target], **thresholds)
        segmentation = _enlarge(result["segmentation"], size)
        return [
            {
                "score": segment["score"],
                "label": self.config.id2label[segment["label_id"]],
                "mask": _encode_png(segmentation == segment["id"]),
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


def _computed_size(output: Any, size: tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) of the computed masks of an image of ``size``."""
    layers = (output.logits if "logits" in output else output.class_queries_logits).shape[1]
    scale = min(1.0, math.sqrt(_MAX_SCORES / (layers * math.prod(size))))
    return max(1, int(size[0] * scale)), max(1, int(size[1] * scale))


def _enlarge(label_map: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return the map (height x width) at ``size``, each pixel with its nearest one's label."""
    if tuple(label_map.shape) == size:
        return label_map
    rows, columns = (
        (torch.arange(length, device=label_map.device) * label_map.shape[axis]).div(
            length, rounding_mode="floor"
        )
        for axis, length in enumerate(size)
    )
    return label_map[rows][:, columns]


def _encode_png(mask: torch.Tensor) -> str:
    file = io.BytesIO()
    Image.fromarray((mask.to(torch.uint8) * 255).cpu().numpy(), mode="L").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
