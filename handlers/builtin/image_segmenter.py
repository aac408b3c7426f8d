"""The built-in handler ``image_segmenter``: the class of each pixel of an image."""

from __future__ import annotations

from typing import Any

import torch

from handlers.builtin.image_classifier import ImageClassifier
from handlers.builtin.vision import VisionHandler
from handlers.explain import attributions
from handlers.torchserve_compat.timer import timed


class ImageSegmenter(VisionHandler):
    """A handler that returns the most probable class of each pixel, with its probability.

    The pixels are those of the image's central 224 x 224. The model must return ``{"out": rows x classes x
    height x width}``, as torchvision's do. A row's value is a list of ``[class, probability]``, height x
    width x 2.
    """

    image_processing = ImageClassifier.image_processing

    @timed
    def postprocess(self, data: dict[str, torch.Tensor]) -> list[Any]:
        probabilities, classes = torch.softmax(data["out"], dim=1).max(dim=1)
        pixels = torch.stack([classes.to(probabilities.dtype), probabilities], dim=3)
        return self._to_values(pixels)

    def get_insights(self, tensor_data: torch.Tensor, raw_data: Any, target: Any = 0) -> list[Any]:
        """Return for each row the attribution of each pixel to the mean probability of class ``target``."""

        def class_probabilities(images: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.model(images)["out"], dim=1).mean(dim=(2, 3))

        return attributions.attribute(
            class_probabilities, tensor_data, self.explanation_options.for_row(self.explained_row, target)
        ).tolist()
