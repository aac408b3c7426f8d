"""A handler that converts images to tensors with NVIDIA's DALI (nvidia-dali-cuda120).

DALI must be installed where the model runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from handlers.builtin.image_classifier import ImageClassifier
from handlers.builtin.vision import VisionHandler
from handlers.errors import PredictionException
from handlers.images import check_image, resize_shorter_side
from handlers.torchserve_compat.timer import timed


def get_dali_pipeline(ctx: Any) -> Any:
    """Return the pipeline that ``dali`` of model-config.yaml describes, for lists of encoded images.

    Its keys are ``batch_size``, ``num_threads``, ``device_id``, ``seed``, and ``pipeline_file``: a serialized
    pipeline in the archive. Without the file, the pipeline is ImageNet's preprocessing, which decodes on the
    GPU if ``device_id`` names one.
    """
    dali = _import_dali()
    options = (ctx.model_yaml_config or {}).get("dali")
    required = ("batch_size", "num_threads", "device_id", "seed")
    if not isinstance(options, Mapping) or not set(required) <= set(options):
        raise ValueError(f"model-config.yaml: dali is {options!r}. It must hold {', '.join(required)}.")
    settings = {name: options[name] for name in required}
    if "pipeline_file" in options:
        file = os.path.join(ctx.system_properties.get("model_dir"), options["pipeline_file"])
        if not os.path.isfile(file):
            raise RuntimeError(f"{file}: the pipeline that model-config.yaml names is not in the archive.")
        pipeline = dali.Pipeline.deserialize(filename=file, prefetch_queue_depth=1, **settings)
        # A serialized pipeline keeps the settings that it was created with.
        pipeline._max_batch_size = settings["batch_size"]
        pipeline._num_threads = settings["num_threads"]
        pipeline._device_id = settings["device_id"]
        return pipeline
    return dali.pipeline_def(_imagenet_pipeline)(
        options["device_id"] is not None, prefetch_queue_depth=1, **settings
    )


class DALIHandler(VisionHandler):
    """A handler whose rows are encoded images, converted to tensors by ``get_dali_pipeline``."""

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        self.pipeline = get_dali_pipeline(context)

    @timed
    def preprocess(self, data: list[Any]) -> torch.Tensor:
        """Return a batch of images, rows x channels x height x width."""
        images = self.pipeline.run(source=self._map_rows(data, _read_image))[0]
        return torch.stack([_to_tensor(images.at(index)) for index in range(len(data))]).to(self.device)


class DALIImageClassifier(DALIHandler):
    """The handler ``image_classifier`` with DALI's preprocessing."""

    topk = ImageClassifier.topk
    set_max_result_classes = ImageClassifier.set_max_result_classes
    get_max_result_classes = ImageClassifier.get_max_result_classes
    postprocess = ImageClassifier.postprocess


def _read_image(row: Any) -> np.ndarray:
    value = (row.get("data") or row.get("body")) if isinstance(row, Mapping) else row
    if not isinstance(value, (bytes, bytearray, memoryview)) or not value:
        raise PredictionException(
            "There is no image: send its bytes as the body, or as the form field data.", 400
        )
    resize_shorter_side(check_image(value), 256)  # DALI has no limit of its own
    return np.frombuffer(value, dtype=np.uint8)


def _to_tensor(image: Any) -> torch.Tensor:
    """Return DALI's tensor, on the GPU or not, as a torch tensor that shares its memory."""
    return torch.as_tensor(image if hasattr(image, "__cuda_array_interface__") else np.asarray(image))


def _import_dali() -> Any:
    try:
        import nvidia.dali
    except ImportError as error:
        raise ImportError(
            "This handler needs NVIDIA's DALI, which is not installed where the model runs: name "
            "nvidia-dali-cuda120 in the archive's requirements, or use image_classifier, which does without."
        ) from error
    return nvidia.dali


def _imagenet_pipeline(on_gpu: bool) -> Any:
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
        images,
        crop=(224, 224),
        mean=[255 * value for value in mean],
        std=[255 * value for value in deviation],
    )
