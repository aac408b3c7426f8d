"""Tests of model folders with image tasks, compared with transformers' own pipelines."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import handlers
from handlers import PredictionException
from handlers.context import Context, Row
from handlers.tasks import segmentation
from tests.support.hf_folders import (
    ServedFolder,
    assert_close,
    encode_png,
    make_image,
    make_pipeline,
    save_segformer,
    save_vit,
    save_yolos,
)

pytestmark = pytest.mark.usefixtures("deterministic")


def test_image_classification_equals_the_pipeline(tmp_path: Path) -> None:
    served, reference = ServedFolder(save_vit(tmp_path)), make_pipeline("image-classification", tmp_path)
    pictures = [make_image(0), make_image(1, 64, 20)]
    encoded = {"inputs": base64.b64encode(encode_png(pictures[1])).decode(), "parameters": {"top_k": 2}}
    error, first, second = served(bytearray(b"no image"), bytearray(encode_png(pictures[0])), encoded)
    assert isinstance(error, PredictionException) and error.error_code == 400
    assert_close([first, second], [reference(pictures[0]), reference(pictures[1], top_k=2)])
    row = Row({"body": bytearray(encode_png(pictures[0]))})
    row.prepared = served.entry.instance.prepare_row(row)
    row["body"] = b"not read again"
    served.context.begin(["1"], [{}], [{}])
    assert_close(served.entry([row], served.context), [first])


def test_the_pixel_limit_is_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_vit(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    [error] = ServedFolder(folder)(bytearray(encode_png(make_image(0))))
    assert error.error_code == 400 and "limit_max_image_pixels: false lifts this limit" in error.message
    context = Context("m", str(folder), {}, limit_max_image_pixels=False)
    entry = handlers.load("huggingface", folder, {})
    entry.initialize(context)
    context.begin(["1"], [{}], [{}])
    [answer] = entry([Row({"body": bytearray(encode_png(make_image(0)))})], context)
    assert len(answer) == 5


@pytest.mark.parametrize(
    "processor, size",
    [
        ({"size": {"shortest_edge": 256}}, (1, 300)),
        ({"size": {"shortest_edge": 1024}}, (20_000, 20)),
        ({"size": {"height": 224, "width": 224}}, (1, 2000)),
        ({"size": {"height": 1024, "width": 1024}}, (100, 100_000)),
        ({"size": {"shortest_edge": 256, "longest_edge": 512}}, (1, 2000)),
    ],
    ids=str,
)
def test_a_resize_bomb_fails_its_own_row(tmp_path: Path, processor: Any, size: tuple[int, int]) -> None:
    save_vit(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    options = {**json.loads(file.read_text()), **processor}
    file.write_text(json.dumps(options))
    served = ServedFolder(tmp_path)
    [refused] = served(bytearray(encode_png(Image.new("1", size))))
    assert isinstance(refused, PredictionException) and refused.error_code == 400
    assert "too large" in refused.message


def test_masks_of_a_large_image_are_computed_at_a_lower_resolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_segformer(tmp_path)
    served = ServedFolder(tmp_path)
    picture = bytearray(encode_png(make_image(0, 90, 60)))
    [exact] = served(picture)
    monkeypatch.setattr(segmentation, "_MAX_SCORES", 3 * 45 * 30)
    interpolate, sizes = torch.nn.functional.interpolate, []

    def record(*args: Any, size: Any = None, **options: Any) -> torch.Tensor:
        sizes.append(size)
        return interpolate(*args, size=size, **options)

    monkeypatch.setattr(torch.nn.functional, "interpolate", record)
    [reduced] = served(picture)
    assert max(height * width for height, width in (tuple(size) for size in sizes if size)) <= 45 * 30
    for segment, expected in zip(reduced, exact, strict=True):
        masks = [Image.open(io.BytesIO(base64.b64decode(each["mask"]))) for each in (segment, expected)]
        first, second = (np.asarray(mask) for mask in masks)
        assert first.shape == second.shape == (60, 90)
        assert segment["label"] == expected["label"] and (first == second).mean() > 0.9


def test_object_detection_equals_the_pipeline(tmp_path: Path) -> None:
    save_yolos(tmp_path)
    pictures = [make_image(0), make_image(1)]
    reference = make_pipeline("object-detection", tmp_path)
    rows = [
        {"inputs": base64.b64encode(encode_png(p)).decode(), "parameters": {"threshold": 0.01}}
        for p in pictures
    ]
    results = ServedFolder(tmp_path)(*rows, bytearray(encode_png(pictures[0])))
    assert_close(
        results, [*(reference(picture, threshold=0.01) for picture in pictures), reference(pictures[0])]
    )
    assert results[0]


def test_image_segmentation_equals_the_pipeline(tmp_path: Path) -> None:
    save_segformer(tmp_path)
    reference = make_pipeline("image-segmentation", tmp_path)
    pictures = [make_image(0), make_image(1, 20, 50)]
    for answer, picture in zip(
        ServedFolder(tmp_path)(*(bytearray(encode_png(p)) for p in pictures)), pictures
    ):
        for segment, expected in zip(answer, reference(picture), strict=True):
            mask = Image.open(io.BytesIO(base64.b64decode(segment.pop("mask"))))
            assert np.array_equal(np.asarray(mask), np.asarray(expected.pop("mask")))
            assert mask.size == picture.size and segment == expected


def test_panoptic_instance_and_semantic_segments_equal_the_pipeline(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ones = [1, 1, 1, 1]
    backbone = transformers.SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=8,
        depths=ones,
        num_heads=ones,
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=6,
        num_labels=3,
        init_std=1.0,
        init_xavier_std=3.0,
    )
    transformers.Mask2FormerForUniversalSegmentation(config).save_pretrained(tmp_path)
    processor = transformers.Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}, ignore_index=255)
    processor.save_pretrained(tmp_path)
    reference, served = make_pipeline("image-segmentation", tmp_path), ServedFolder(tmp_path)
    pictures = [make_image(0), make_image(1, 20, 50)]
    limits = {"threshold": 0.3, "mask_threshold": 0.3, "overlap_mask_area_threshold": 0.1}
    requests = [(picture, kind) for kind in ("panoptic", "instance", "semantic") for picture in pictures]
    rows = [
        {"inputs": base64.b64encode(encode_png(picture)).decode(), "parameters": {"subtask": kind, **limits}}
        for picture, kind in requests
    ]
    results, kinds = served(*rows), set()
    for answer, (picture, kind) in zip(results, requests, strict=True):
        for segment, expected in zip(answer, reference(picture, subtask=kind, **limits), strict=True):
            mask = Image.open(io.BytesIO(base64.b64decode(segment.pop("mask"))))
            assert (
                np.array_equal(np.asarray(mask), np.asarray(expected.pop("mask")))
                and mask.size == picture.size
            )
            assert_close(segment, expected)
            kinds.add(kind)
    assert kinds == {"panoptic", "instance", "semantic"}, "every kind has segments"
    [error] = ServedFolder(save_segformer(tmp_path / "classes"))(
        {**rows[0], "parameters": {"subtask": "panoptic"}}
    )
    assert error.error_code == 400 and "no panoptic segments; the subtask may be semantic" in error.message
