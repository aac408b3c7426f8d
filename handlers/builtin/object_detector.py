"""Which things are where in an image."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from handlers import explanations
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
        """For each row what each pixel had to do with the surest box of label ``target``, a number."""
        if type(target) is not int:
            raise PredictionException(f"The target must be a label's number, and is {target!r:.100}.", 400)

        def surest(images: torch.Tensor) -> torch.Tensor:
            scores = [found["scores"][found["labels"] == target] for found in self.model(images)]
            return torch.stack([score.max() if len(score) else score.new_zeros(()) for score in scores])

        question = self.question.of(self.asked, 0)
        if question.method is None:  # which boxes there are has no gradient
            question = dataclasses.replace(question, method="feature_ablation")
        return explanations.attributions(surest, tensor_data, question).tolist()

    def explain_handle(self, data_preprocess: Any, raw_data: list[Any]) -> list[Any]:
        return self._insights_by_row([image[None] for image in data_preprocess], raw_data)
