import numpy as np
import torch
from PIL import Image

from handlers.builtin.image_classifier import ImageClassifier


class DigitClassifier(ImageClassifier):
    """A handler that returns the three most probable digits of an image, with their probabilities."""

    topk = 3

    def image_processing(self, image: Image.Image) -> torch.Tensor:
        small = image.convert("L").resize((8, 8), Image.Resampling.BOX)
        ink = np.asarray(small, dtype=np.float32) * (16 / 255)
        if ink.mean() > 8:  # dark ink on light paper; the network was trained on light ink
            ink = 16 - ink
        return torch.from_numpy(ink).unsqueeze(0)
