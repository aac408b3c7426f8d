"""Tests of the segmenter and the detector, with models that return torchvision's formats.

The expected values are computed with plain arithmetic.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import handlers
from handlers.context import Context
from handlers.errors import PredictionException

# A pixel's classes are its channels, twice.
SEGMENTER = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return {"out": torch.cat([x, x - 10], dim=1), "aux": x}
"""
# The whole image has label 2 with its mean red as the score, its left half label 1, and a third box a low
# score.
DETECTOR = """
import torch

class Net(torch.nn.Module):
    def forward(self, images):
        detections = []
        for image in images:
            height, width = image.shape[1:]
            corners = [[0, 0, width, height], [0, 0, width / 2, height], [1, 1, 2, 2]]
            boxes = torch.tensor(corners, dtype=torch.float32)
            scores = torch.stack([image[0].mean(), torch.tensor(0.5), torch.tensor(0.25)])
            detections.append({"boxes": boxes, "labels": torch.tensor([2, 1, 1]), "scores": scores})
        return detections
"""


def make_png(red: int, width: int = 256, height: int = 256, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (red, 0, 0)).convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def predict(archive: Callable[..., Path], begin: Callable[..., Context]) -> Callable[..., list[Any]]:
    """Return ``run(handler, model, rows, labels, **headers)``, which returns the built-in handler's
    values.
    """

    def run(name: str, source: str, rows: list[Any], labels: Any = None, **headers: str) -> list[Any]:
        directory = archive(model=source)
        if labels is not None:
            (directory / "index_to_name.json").write_text(json.dumps(labels))
        manifest = {"model": {"modelFile": "model.py"}}
        entry = handlers.load(name, directory, manifest)
        context = Context("m", str(directory), manifest)
        entry.initialize(context)
        return entry(rows, begin(context, len(rows), **headers))

    return run


def test_each_pixel_has_a_class_and_its_probability(predict: Any) -> None:
    green = np.broadcast_to(np.array([0, 3, 0])[:, None, None], (3, 224, 224)).tolist()
    rows = [{"data": make_png(255)}, {"data": b"none"}, {"body": green}]
    red, broken, tensor = predict("image_segmenter", SEGMENTER, rows)
    assert isinstance(broken, PredictionException) and broken.error_code == 400
    means, deviations = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    for answer, pixel, expected in (
        (red, (np.array([1, 0, 0]) - means) / deviations, 0),
        (tensor, [0, 3, 0], 1),
    ):
        logits = np.concatenate([pixel, np.array(pixel) - 10])
        probability = np.exp(logits[expected]) / np.exp(logits).sum()
        assert np.array(answer).shape == (224, 224, 2)
        assert answer[0][0] == answer[223][100] == [expected, pytest.approx(probability, abs=1e-5)]
        assert isinstance(answer[0][0][0], float)


def test_detections_have_boxes_and_scores(predict: Any) -> None:
    labels = {"object_type_names": ["background", "person", "car"]}
    bright, dark = predict(
        "object_detector", DETECTOR, [{"data": make_png(204)}, {"body": make_png(51)}], labels
    )
    half = {"person": [0.0, 0.0, 128.0, 256.0], "score": 0.5}
    assert bright == [{"car": [0.0, 0.0, 256.0, 256.0], "score": pytest.approx(0.8)}, half]
    assert [list(detection) for detection in bright] == [["car", "score"], ["person", "score"]]
    assert dark == [half]


def test_images_of_a_batch_may_differ_in_size_and_mode(predict: Any) -> None:
    rows = [{"data": make_png(255, 30, 20)}, {"data": b"none"}, {"data": make_png(255, 8, 6, "RGBA")}]
    wide, broken, small = predict("object_detector", DETECTOR, rows)
    assert wide == [{"2": [0.0, 0.0, 30.0, 20.0], "score": 1.0}, {"1": [0.0, 0.0, 15.0, 20.0], "score": 0.5}]
    assert small[0] == {"2": [0.0, 0.0, 8.0, 6.0], "score": 1.0}
    assert broken.error_code == 400


def test_a_subclass_may_set_the_threshold(archive: Any, predict: Any) -> None:
    archive(
        handler="""
        from handlers.builtin.object_detector import ObjectDetector

        class Careful(ObjectDetector):
            threshold = 0.9
        """
    )
    assert predict("handler.py", DETECTOR, [{"data": make_png(204)}, {"data": make_png(255)}]) == [
        [],
        [{"2": [0.0, 0.0, 256.0, 256.0], "score": 1.0}],
    ]


def test_a_box_is_attributed_to_pixels(predict: Any) -> None:
    rows = [{"data": make_png(204, 8, 6), "target": "2"}, {"data": make_png(51, 4, 4), "target": "2"}]
    wide, small = map(np.array, predict("object_detector", DETECTOR, rows, explain="True"))
    assert (wide.shape, small.shape) == ((3, 6, 8), (3, 4, 4))
    assert [wide.sum(), small.sum()] == pytest.approx([0.8, 0.2], abs=1e-5), (
        "the score is the mean of the red channel"
    )
    [other] = predict(
        "object_detector", DETECTOR, [{"data": make_png(204, 8, 6), "target": "7"}], explain="True"
    )
    assert not np.any(other), "there is no such detection"
    [error] = predict(
        "object_detector", DETECTOR, [{"data": make_png(204), "target": "car"}, rows[0]], explain="True"
    )[:1]
    assert error.error_code == 400 and "a label's number" in error.message


def test_a_segment_is_attributed_to_pixels(predict: Any) -> None:
    tensor = np.random.default_rng(0).normal(size=(3, 8, 8))
    row = {"body": tensor.tolist(), "target": 1, "steps": 200}
    [attributions] = predict("image_segmenter", SEGMENTER, [row], explain="True")

    def class_probability(image: np.ndarray) -> float:
        exponentials = np.exp(np.concatenate([image, image - 10]))
        return float((exponentials[1] / exponentials.sum(0)).mean())

    assert np.sum(attributions) == pytest.approx(
        class_probability(tensor) - class_probability(tensor * 0), abs=1e-3
    )
