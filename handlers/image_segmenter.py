"""What each pixel of an image belongs to."""

from __future__ import annotations

from typing import Any

import torch

from handlers import explanations
from handlers.image_classifier import ImageClassifier
from handlers.timer import timed
from handlers.vision import VisionHandler


class ImageSegmenter(VisionHandler):
    """For each pixel of the image's middle 224 x 224 its likeliest class and that class's probability.

    The model answers ``{"out": rows x classes x height x width}``, as torchvision's do. A row's answer is
    a list of ``[class, probability]``, height x width x 2.
    """

    image_processing = ImageClassifier.image_processing

    @timed
    def postprocess(self, data: dict[str, torch.Tensor]) -> list[Any]:
        probabilities, classes = torch.softmax(data["out"], dim=1).max(dim=1)
        pixels = torch.stack([classes.to(probabilities.dtype), probabilities], dim=3)
        return self._numbers(pixels)

    def get_insights(self, tensor_data: torch.Tensor, raw_data: Any, target: Any = 0) -> list[Any]:
        """For each row what each pixel had to do with the part of the image that class ``target`` has: its mean
        probability."""

        def parts(images: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.model(images)["out"], dim=1).mean(dim=(2, 3))

        return explanations.attributions(parts, tensor_data, self.question.of(self.asked, target)).tolist()
