"""Which things are where in an image."""

from __future__ import annotations

from typing import Any

import torch

from handlers.errors import PredictionException
from handlers.labels import map_class_to_label
from handlers.timer import timed
from handlers.vision import Compose, ToRGB, ToTensor, VisionHandler


class ObjectDetector(VisionHandler):
    """``[{label: [x1, y1, x2, y2], "score": probability}, ...]`` of each image, without those below ``threshold``.

    The model takes a list of images, channels x height x width, and answers for each ``{"boxes",
    "labels", "scores"}``, as torchvision's do. A batch's images may differ in size.
    """

    image_processing = Compose([ToRGB(), ToTensor()])
    threshold = 0.5
    prepare_row = VisionHandler.prepare_row

    @timed
    def preprocess(self, data: list[Any]) -> torch.Tensor | list[torch.Tensor]:
        """The images as one tensor or, where their sizes differ, as a list."""
        images = self._each(data, self._image)
        if all(image.shape == images[0].shape for image in images):
            return torch.stack(images).to(self.device)
        return [image.to(self.device) for image in images]

    @timed
    def postprocess(self, data: list[dict[str, torch.Tensor]]) -> list[list[dict[str, Any]]]:
        return [self._found(image) for image in data]

    def _found(self, image: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        sure = image["scores"] >= self.threshold
        boxes, classes, scores = (image[key][sure].tolist() for key in ("boxes", "labels", "scores"))
        return [
            {**map_class_to_label([[box]], self.mapping, [[cls]])[0], "score": score}
            for box, cls, score in zip(boxes, classes, scores)
        ]

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> list[Any]:
        raise PredictionException("A detector's answers are boxes, which integrated gradients cannot explain.", 501)
