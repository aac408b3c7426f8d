"""The built-in handler ``image_classifier``: images to labels."""

from __future__ import annotations

import torch

from handlers.builtin.labels import map_class_to_label
from handlers.builtin.vision import CenterCrop, Compose, Normalize, RGBResize, ToTensor, VisionHandler
from handlers.torchserve_compat.timer import timed


class ImageClassifier(VisionHandler):
    """A handler that returns ``{label: probability}`` of the ``topk`` most probable classes, in that
    order.
    """

    topk = 5
    image_processing = Compose(
        [
            RGBResize(256),
            CenterCrop(224),
            ToTensor(),
            Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),  # ImageNet's
        ]
    )

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    @timed
    def postprocess(self, data: torch.Tensor) -> list[dict[str, float]]:
        probabilities, classes = torch.softmax(data, dim=1).topk(min(self.topk, data.shape[1]), dim=1)
        return map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist())
