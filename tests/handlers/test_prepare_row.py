"""Images that are decoded ahead of their batch, and handlers that do it their own way."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from handlers.context import Row
from handlers.errors import PredictionException
from handlers.image_classifier import ImageClassifier
from handlers.rejections import Rejections


@pytest.fixture
def photograph() -> bytes:
    pixels = np.random.default_rng(3).integers(0, 256, (300, 280, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def handler(cls: type[ImageClassifier] = ImageClassifier) -> ImageClassifier:
    made = cls()
    made.device = torch.device("cpu")
    return made


def test_what_was_prepared_is_what_the_batch_would_have_made(photograph: bytes) -> None:
    row = Row({"body": photograph})
    made = handler()
    row.prepared = made.prepare_row(row)
    assert torch.equal(made.preprocess([row]), made.preprocess([{"body": photograph}]))
    row.clear()  # it is not decoded again
    assert made.preprocess([row]).shape == (1, 3, 224, 224)


def test_an_image_that_could_not_be_prepared_is_its_rows_error(photograph: bytes) -> None:
    made = handler()
    row = Row({"body": b"no image"})
    with pytest.raises(PredictionException) as caught:
        made.prepare_row(row)
    row.prepared = caught.value
    rejections = Rejections(2)
    with rejections.taken():
        batch = made.preprocess([row, Row({"body": photograph})])
    assert batch.shape[0] == 2 and rejections.over([1, 2]) == [caught.value, 2]


def test_a_preprocess_of_its_own_gets_rows_that_nobody_touched() -> None:
    class Own(ImageClassifier):
        def preprocess(self, data):
            return data

    class Further(Own):
        pass

    class Both(Own):
        def prepare_row(self, row):
            return 1

    assert handler(Own).prepare_row is None and handler(Further).prepare_row is None
    assert handler(Both).prepare_row(Row({})) == 1
    assert ImageClassifier.prepare_row is not None
