import numpy as np
import torch
from PIL import Image

from handlers.image_classifier import ImageClassifier


class DigitClassifier(ImageClassifier):
    """An image of one digit in, the three likeliest digits and their probabilities out."""

    topk = 3

    def image_processing(self, image: Image.Image) -> torch.Tensor:
        small = image.convert("L").resize((8, 8), Image.Resampling.BOX)
        ink = np.asarray(small, dtype=np.float32) * (16 / 255)
        if ink.mean() > 8:  # dark ink on light paper, where the network learned light ink on dark
            ink = 16 - ink
        return torch.from_numpy(ink).unsqueeze(0)
