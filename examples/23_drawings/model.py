"""A detector of figures, houses and suns in children's drawings: centres on a heat map, with their sizes."""

from typing import Any

import torch
from torch import nn

CLASSES = 3
STRIDE = 4  # pixels of a cell of the heat map


class Detector(nn.Module):
    """Takes images of values from 0 to 1; returns boxes, labels and scores, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        widths, layers, channels = (8, 16, 24, 24, 24), [], 3
        for index, width in enumerate(widths):
            stride = 2 if index < 2 else 1
            dilation = 1 if index < 2 else 2 ** (index - 1)  # a cell sees the whole of a large figure
            layers += [
                nn.Conv2d(channels, width, 3, stride, dilation, dilation, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        self.body = nn.Sequential(*layers)
        self.centre = nn.Conv2d(channels, CLASSES, 1)
        self.size = nn.Conv2d(channels, 2, 1)  # width and height, in cells
        nn.init.constant_(self.centre.bias, -4.0)  # most cells are no centre

    def heads(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(1 - images)  # the strokes, not the paper
        return self.centre(features), self.size(features)

    def forward(self, images: torch.Tensor | list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        if isinstance(images, list):  # of different sizes
            return [found for image in images for found in self(image[None])]
        centres, sizes = self.heads(images)
        scores = centres.sigmoid()
        is_peak = nn.functional.max_pool2d(scores, 5, 1, 2) == scores
        scores = scores * is_peak
        return [self._boxes(score, size) for score, size in zip(scores, sizes)]

    def _boxes(self, scores: torch.Tensor, sizes: torch.Tensor, most: int = 20) -> dict[str, Any]:
        width = scores.shape[-1]
        values, places = scores.flatten().topk(most)
        labels, cells = places // scores[0].numel(), places % scores[0].numel()
        centre = torch.stack([cells % width, cells // width], 1) + 0.5
        half = sizes.flatten(1)[:, cells].T / 2
        return {
            "boxes": torch.cat([centre - half, centre + half], 1) * STRIDE,
            "labels": labels,
            "scores": values,
        }
