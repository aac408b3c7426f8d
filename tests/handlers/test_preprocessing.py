"""Tests of preprocessing against torchvision's tensors, recorded in data/preprocessing.npz."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from handlers.builtin.image_classifier import ImageClassifier
from handlers.builtin.image_segmenter import ImageSegmenter
from tests.support.photographs import photographs

pytestmark = pytest.mark.integration


DATA = Path(__file__).parent / "data"
with np.load(DATA / "preprocessing.npz") as file:
    RECORDED = dict(file)
NAMES = [name for name in RECORDED if not name.endswith(": mean")]


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    return photographs()


def test_every_photograph_is_recorded(contents: dict[str, bytes]) -> None:
    assert sorted(contents) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("handler", [ImageClassifier, ImageSegmenter])
def test_a_photographs_tensor_equals_torchvisions(
    contents: dict[str, bytes], name: str, handler: type[ImageClassifier]
) -> None:
    handler = handler()
    handler.device = torch.device("cpu")
    [tensor] = handler.preprocess([{"data": bytearray(contents[name])}])
    assert tensor.shape == (3, 224, 224)
    assert np.abs(tensor[:, ::8, ::8].numpy() - RECORDED[name]).max() < 1e-3
    assert np.abs(tensor.mean(dim=(1, 2)).numpy() - RECORDED[f"{name}: mean"]).max() < 1e-4


def test_exif_orientation_is_ignored() -> None:
    assert (RECORDED["orientation"] == RECORDED["whole"]).all()
