"""Tests of DALI's preprocessing, and of the error if DALI is not installed."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import handlers
from handlers.builtin.dali import DALIHandler, _read_image
from handlers.context import Context
from handlers.errors import PredictionException

MODEL = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x.mean(dim=(2, 3))
"""
OPTIONS = {"batch_size": 4, "num_threads": 1, "device_id": None, "seed": 1}
MANIFEST = {"model": {"modelFile": "model.py"}}
HAVE_DALI = (
    importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
)


def context(directory: Path, dali: Any) -> Context:
    return Context("m", str(directory), MANIFEST, model_yaml_config={"dali": dali})


def make_png(red: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (300, 260), (red, 0, 255)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.skipif(HAVE_DALI, reason="needs an environment without nvidia-dali")
def test_a_missing_dali_is_an_error(archive: Any) -> None:
    entry = handlers.load("dali_image_classifier", archive(model=MODEL), MANIFEST)
    with pytest.raises(
        ImportError, match="nvidia-dali-cuda120 in the archive's requirements, or use image_classifier"
    ):
        entry.initialize(context(archive(), OPTIONS))


@pytest.mark.parametrize("size", [(1, 2000), (1, 300), (10_000, 9000)])
def test_an_image_that_is_too_large_is_refused_before_it_is_decoded(size: tuple[int, int]) -> None:
    buffer = io.BytesIO()
    Image.new("1", size).save(buffer, "PNG")
    with pytest.raises(PredictionException, match="too large") as raised:
        DALIHandler()._map_rows([{"body": buffer.getvalue()}], _read_image)
    assert raised.value.error_code == 400


@pytest.mark.skipif(not HAVE_DALI, reason="needs nvidia-dali")
class TestDALI:
    def test_images_are_classified(self, archive: Any, begin: Any) -> None:
        directory = archive(model=MODEL)
        (directory / "index_to_name.json").write_text(json.dumps({"0": "red", "1": "green", "2": "blue"}))
        entry = handlers.load("dali_image_classifier", directory, MANIFEST)
        entry.instance.set_max_result_classes(1)
        entry.initialize(context(directory, OPTIONS))
        rows = [{"data": bytearray(make_png(0))}, {"body": "none"}, {"body": make_png(255)}]
        first, second, third = entry(rows, begin(entry.instance.context, 3))
        assert list(first) == ["blue"] and second.error_code == 400 and len(third) == 1
        assert first["blue"] > third["blue"]

    @pytest.mark.parametrize("options", [None, 3, {"batch_size": 1}])
    def test_incomplete_configurations_are_rejected(self, archive: Any, options: Any) -> None:
        entry = handlers.load("dali_image_classifier", archive(model=MODEL), MANIFEST)
        with pytest.raises(ValueError, match=r"dali is .*must hold batch_size, num_threads, device_id, seed"):
            entry.initialize(context(archive(), options))

    def test_a_pipeline_of_the_archive_is_used(self, archive: Any, begin: Any) -> None:
        from nvidia import dali

        @dali.pipeline_def(batch_size=1, num_threads=1, device_id=None)
        def grey() -> Any:
            encoded = dali.fn.external_source(dtype=dali.types.UINT8, name="source")
            image = dali.fn.decoders.image(encoded, output_type=dali.types.GRAY)
            return dali.fn.cast(dali.fn.transpose(image, perm=[2, 0, 1]), dtype=dali.types.FLOAT)

        directory = archive(model=MODEL)
        grey().serialize(filename=str(directory / "grey.dali"))
        entry = handlers.load("dali_image_classifier", directory, MANIFEST)
        entry.initialize(context(directory, {**OPTIONS, "pipeline_file": "grey.dali"}))
        data = entry.instance.preprocess([{"data": make_png(0)}, {"data": make_png(255)}])
        assert data.shape == (2, 1, 260, 300) and data[0].mean() < data[1].mean()
        with pytest.raises(RuntimeError, match=r"none\.dali: the pipeline"):
            entry.initialize(context(directory, {**OPTIONS, "pipeline_file": "none.dali"}))
