"""Writes preprocessing.npz: every 8th pixel of torchvision's ImageNet preprocessing.

    python -m tests.recorders.preprocessing

It needs torchvision (0.28.0 wrote the file that is here), which the tests do not.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision import transforms

from tests.support.photographs import photographs

DATA = Path(__file__).parents[1] / "handlers/data"
PREPROCESSING = transforms.Compose(
    [
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ]
)

if __name__ == "__main__":
    recorded = {}
    for name, content in photographs().items():
        image = Image.open(io.BytesIO(content))
        if image.mode == "I;16":  # the upper 8 bits of the 16
            image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
        tensor = PREPROCESSING(image.convert("RGB"))
        recorded[name] = tensor[:, ::8, ::8].numpy()
        recorded[f"{name}: mean"] = tensor.mean(dim=(1, 2)).numpy()
    np.savez_compressed(DATA / "preprocessing.npz", **recorded)
