"""Images to tensors with NVIDIA's DALI, which must be installed where the model runs (nvidia-dali-cuda120)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from handlers.errors import PredictionException
from handlers.image_classifier import ImageClassifier
from handlers.timer import timed
from handlers.vision import VisionHandler


def get_dali_pipeline(ctx: Any) -> Any:
    """The pipeline that ``dali`` of model-config.yaml describes, ready to run on a list of encoded images.

    ``batch_size``, ``num_threads``, ``device_id``, ``seed``, and ``pipeline_file``: a serialized pipeline in
    the archive. Without the file: ImageNet's preprocessing, which decodes on the GPU where ``device_id`` names one.
    """
    dali = _dali()
    options = (ctx.model_yaml_config or {}).get("dali")
    needed = ("batch_size", "num_threads", "device_id", "seed")
    if not isinstance(options, Mapping) or not set(needed) <= set(options):
        raise ValueError(f"model-config.yaml: dali is {options!r}. It must hold {', '.join(needed)}.")
    settings = {name: options[name] for name in needed}
    if "pipeline_file" in options:
        file = os.path.join(ctx.system_properties.get("model_dir"), options["pipeline_file"])
        if not os.path.isfile(file):
            raise RuntimeError(f"{file}: the pipeline that model-config.yaml names is not in the archive.")
        pipeline = dali.Pipeline.deserialize(filename=file, prefetch_queue_depth=1, **settings)
        # A serialized pipeline remembers what it was made with.
        pipeline._max_batch_size = settings["batch_size"]
        pipeline._num_threads = settings["num_threads"]
        pipeline._device_id = settings["device_id"]
        return pipeline
    return dali.pipeline_def(_imagenet)(options["device_id"] is not None, prefetch_queue_depth=1, **settings)


class DALIHandler(VisionHandler):
    """Each row is an encoded image, which a DALI pipeline makes a tensor of; see ``get_dali_pipeline``."""

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        self.pipeline = get_dali_pipeline(context)

    @timed
    def preprocess(self, data: list[Any]) -> torch.Tensor:
        """A batch of images, rows x channels x height x width."""
        images = self.pipeline.run(source=self._each(data, _encoded))[0]
        return torch.stack([_tensor(images.at(index)) for index in range(len(data))]).to(self.device)


class DALIImageClassifier(DALIHandler):
    """``image_classifier`` with DALI's preprocessing."""

    topk = ImageClassifier.topk
    set_max_result_classes = ImageClassifier.set_max_result_classes
    get_max_result_classes = ImageClassifier.get_max_result_classes
    postprocess = ImageClassifier.postprocess


def _encoded(row: Any) -> np.ndarray:
    value = (row.get("data") or row.get("body")) if isinstance(row, Mapping) else row
    if not isinstance(value, (bytes, bytearray, memoryview)) or not value:
        raise PredictionException("There is no image: send its bytes as the body, or as the form field data.", 400)
    return np.frombuffer(value, dtype=np.uint8)


def _tensor(image: Any) -> torch.Tensor:
    """DALI's tensor, on the GPU or not, as torch's; it shares the memory."""
    return torch.as_tensor(image if hasattr(image, "__cuda_array_interface__") else np.asarray(image))


def _dali() -> Any:
    try:
        import nvidia.dali
    except ImportError as error:
        raise ImportError(
            "This handler needs NVIDIA's DALI, which is not installed where the model runs: name nvidia-dali-cuda120 "
            "in the archive's requirements, or use image_classifier, which does without."
        ) from error
    return nvidia.dali


def _imagenet(on_gpu: bool) -> Any:
    from nvidia.dali import fn, types

    encoded = fn.external_source(dtype=types.UINT8, name="source")
    images = fn.resize(
        fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu"),
        size=[256],
        mode="not_smaller",
        interp_type=types.DALIInterpType.INTERP_LINEAR,
        antialias=True,
        subpixel_scale=False,
    )
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
    return fn.crop_mirror_normalize(
        images, crop=(224, 224), mean=[255 * value for value in mean], std=[255 * value for value in deviation]
    )
