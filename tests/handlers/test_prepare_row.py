"""Tests of images that are decoded before their batch, and of handlers with their own preprocess."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from handlers.builtin.image_classifier import ImageClassifier
from handlers.context import Row
from handlers.errors import PredictionException
from handlers.row_errors import RowErrors


@pytest.fixture
def photograph() -> bytes:
    pixels = np.random.default_rng(3).integers(0, 256, (300, 280, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def make_handler(cls: type[ImageClassifier] = ImageClassifier) -> ImageClassifier:
    image_handler = cls()
    image_handler.device = torch.device("cpu")
    return image_handler


def test_a_prepared_row_equals_the_batchs_own_result(photograph: bytes) -> None:
    row = Row({"body": photograph})
    image_handler = make_handler()
    row.prepared = image_handler.prepare_row(row)
    assert torch.equal(image_handler.preprocess([row]), image_handler.preprocess([{"body": photograph}]))
    row.clear()  # it is not decoded again
    assert image_handler.preprocess([row]).shape == (1, 3, 224, 224)


def test_a_preparation_error_fails_its_row(photograph: bytes) -> None:
    image_handler = make_handler()
    row = Row({"body": b"no image"})
    with pytest.raises(PredictionException) as raised:
        image_handler.prepare_row(row)
    row.prepared = raised.value
    row_errors = RowErrors(2)
    with row_errors.activate():
        batch = image_handler.preprocess([row, Row({"body": photograph})])
    assert batch.shape[0] == 2 and row_errors.merge_into([1, 2]) == [raised.value, 2]


def test_handlers_with_their_own_preprocess_are_not_prepared() -> None:
    class CustomPreprocess(ImageClassifier):
        def preprocess(self, data):
            return data

    class Derived(CustomPreprocess):
        pass

    class CustomBoth(CustomPreprocess):
        def prepare_row(self, row):
            return 1

    assert make_handler(CustomPreprocess).prepare_row is None and make_handler(Derived).prepare_row is None
    assert make_handler(CustomBoth).prepare_row(Row({})) == 1
    assert ImageClassifier.prepare_row is not None
