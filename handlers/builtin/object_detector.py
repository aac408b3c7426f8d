"""The built-in handler ``object_detector``: the objects in an image and their boxes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from handlers.builtin.labels import map_class_to_label
from handlers.builtin.vision import Compose, RGBToTensor, VisionHandler
from handlers.errors import PredictionException
from handlers.explain import attributions
from handlers.row_parsing import resolve_target
from handlers.torchserve_compat.timer import timed


class ObjectDetector(VisionHandler):
    """A handler that returns ``[{label: [x1, y1, x2, y2], "score": probability}, ...]`` for each image.

    Boxes with a score below ``threshold`` are left out. The model takes a list of images, channels x height x
    width, and returns for each ``{"boxes", "labels", "scores"}``, as torchvision's do. A batch's images may
    differ in size.
    """

    image_processing = Compose([RGBToTensor()])
    threshold = 0.5
    prepare_row = VisionHandler.prepare_row

    @timed
    def preprocess(self, data: list[Any]) -> torch.Tensor | list[torch.Tensor]:
        """Return the images as one tensor or, if their sizes differ, as a list."""
        images = self._map_rows(data, self._read_image)
        if all(image.shape == images[0].shape for image in images):
            return torch.stack(images).to(self.device)
        return [image.to(self.device) for image in images]

    @timed
    def postprocess(self, data: list[dict[str, torch.Tensor]]) -> list[list[dict[str, Any]]]:
        return [self._format_detections(image) for image in data]

    def _format_detections(self, image: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        is_detected = image["scores"] >= self.threshold
        boxes, classes, scores = (image[key][is_detected].tolist() for key in ("boxes", "labels", "scores"))
        return [
            {**map_class_to_label([[box]], self.mapping, [[cls]])[0], "score": score}
            for box, cls, score in zip(boxes, classes, scores)
        ]

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> list[Any]:
        """Return for each row the attribution of each pixel to the box of label ``target`` with the highest
        score.

        ``target`` is the label's number.
        """
        target = resolve_target(target)
        if type(target) is not int:
            raise PredictionException(f"The target must be a label's number, and is {target!r:.100}.", 400)

        def max_score(images: torch.Tensor) -> torch.Tensor:
            scores = [
                detections["scores"][detections["labels"] == target] for detections in self.model(images)
            ]
            return torch.stack([score.max() if len(score) else score.new_zeros(()) for score in scores])

        options = self.explanation_options.for_row(self.explained_row, 0)
        if options.method is None:  # the selection of boxes has no gradient
            options = dataclasses.replace(options, method="feature_ablation")
        return attributions.attribute(max_score, tensor_data, options).tolist()

    def explain_handle(self, data_preprocess: Any, raw_data: list[Any]) -> list[Any]:
        return self._insights_by_row([image[None] for image in data_preprocess], raw_data)
