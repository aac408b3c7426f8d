"""Tests of archives in the styles that TorchServe's users publish, run unchanged.

The expected values are those of TorchServe 0.12 for the same archives and requests.
"""

from __future__ import annotations

import io
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import handlers
from handlers.context import Context
from handlers.metrics import MetricCache
from handlers.torchserve_compat import names

LINEAR = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.fc.weight.data = torch.tensor([[1.0, 0.0], [0.0, 10.0]])

    def forward(self, x):
        return self.fc(x)
"""
# The ten means of the image's tenths, from the left.
DIGITS = """
import torch

class DigitNet(torch.nn.Module):
    def forward(self, x):
        return x[:, 0].reshape(len(x), 20, 10, 2).mean(dim=(1, 3))
"""
PIXELS = """
import torch

class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean(dim=(2, 3))
"""
DETECTOR = """
import torch

class Detector(torch.nn.Module):
    def forward(self, images):
        boxes = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
        return [
            {"boxes": boxes, "labels": torch.tensor([1, 2]), "scores": torch.tensor([0.75, 0.25])}
            for image in images
        ]
"""
TOPICS = """
import torch

class Topics(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(4, 2, mode="sum")
        self.embedding.weight.data = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.5, 0.5]])

    def forward(self, text, offsets):
        return self.embedding(text, offsets)
"""


def png(*columns: int, height: int = 20, mode: str = "L") -> bytes:
    """Return an image of these grey columns, two pixels wide each."""
    image = Image.new("L", (2 * len(columns), height))
    image.putdata([columns[x // 2] for _ in range(height) for x in range(image.width)])
    buffer = io.BytesIO()
    image.convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


def make_case(handler: str, model: str, rows: list[Any], answers: list[Any], **more: Any) -> dict[str, Any]:
    return {"handler": handler, "model": model, "rows": rows, "answers": answers, **more}


DIGIT_CLASSIFIER = make_case(
    """
    import numpy as np
    import torch
    from ts.torch_handler.image_classifier import ImageClassifier
    from torch.profiler import ProfilerActivity

    class MNISTDigitClassifier(ImageClassifier):
        image_processing = staticmethod(lambda image: torch.from_numpy(np.array(image)).float()[None] / 255)

        def __init__(self):
            super(MNISTDigitClassifier, self).__init__()
            self.profiler_args = {"activities": [ProfilerActivity.CPU], "record_shapes": True}

        def postprocess(self, data):
            return data.argmax(1).tolist()
    """,
    DIGITS,
    [{"data": bytearray(png(0, 0, 0, 9, 0, 0, 0, 0, 0, 0))}, {"body": bytearray(png(*range(10)))}],
    [3, 9],
)
TOP_ONE = make_case(
    """
    from ts.torch_handler.image_classifier import ImageClassifier

    class TopOne(ImageClassifier):
        topk = 1
    """,
    PIXELS,
    [{"data": bytearray(png(*[200] * 150, height=300, mode="RGB"))}],
    [{"blue": pytest.approx(0.4010091722011566, abs=1e-6)}],
    files={"index_to_name.json": json.dumps({"0": ["n0", "red"], "1": ["n1", "green"], "2": ["n2", "blue"]})},
)
VISION = make_case(
    """
    import io

    import numpy as np
    import torch
    from PIL import Image
    from ts.torch_handler.vision_handler import VisionHandler

    class Brightness(VisionHandler):
        def image_processing(self, image):
            return torch.from_numpy(np.asarray(image.resize((8, 8)), dtype=np.float32)).permute(2, 0, 1)

        def inference(self, data, *args, **kwargs):
            with torch.no_grad():
                return self.model(data.to(self.device))

        def postprocess(self, data):
            return [{"brightness": round(row.mean().item(), 3)} for row in data]
    """,
    PIXELS,
    [{"data": bytearray(png(30, 60, mode="RGB"))}, {"data": bytearray(png(90, 90, mode="RGB"))}],
    [{"brightness": 45.0}, {"brightness": 90.0}],
)
TRANSFORMERS = make_case(
    """
    import ast
    import json
    import logging
    import os
    from abc import ABC

    import torch
    from ts.torch_handler.base_handler import BaseHandler

    logger = logging.getLogger(__name__)

    class TransformersSeqClassifierHandler(BaseHandler, ABC):
        def __init__(self):
            super(TransformersSeqClassifierHandler, self).__init__()
            self.initialized = False

        def initialize(self, ctx):
            self.manifest = ctx.manifest
            properties = ctx.system_properties
            model_dir = properties.get("model_dir")
            serialized_file = self.manifest["model"].get("serializedFile")
            self.device = torch.device(
                "cuda:" + str(properties.get("gpu_id"))
                if torch.cuda.is_available() and properties.get("gpu_id") is not None
                else "cpu"
            )
            with open(os.path.join(model_dir, "setup_config.json")) as setup_config_file:
                self.setup_config = json.load(setup_config_file)
            from model import Net
            self.model = Net().to(self.device)
            self.model.eval()
            self.tokenizer = lambda text, max_length: [float(len(word)) for word in text.split()][:max_length]
            with open(os.path.join(model_dir, "index_to_name.json")) as f:
                self.mapping = json.load(f)
            self.initialized = True

        def preprocess(self, requests):
            input_ids_batch = None
            for idx, data in enumerate(requests):
                input_text = data.get("data")
                if input_text is None:
                    input_text = data.get("body")
                if isinstance(input_text, (bytes, bytearray)):
                    input_text = input_text.decode("utf-8")
                max_length = self.setup_config["max_length"]
                logger.info("Received text: '%s'", input_text)
                inputs = torch.tensor([self.tokenizer(input_text, int(max_length))]).to(self.device)
                input_ids_batch = (
                    inputs if input_ids_batch is None else torch.cat((input_ids_batch, inputs), 0)
                )
            return (input_ids_batch, torch.ones_like(input_ids_batch))

        def inference(self, input_batch):
            input_ids_batch, attention_mask_batch = input_batch
            inferences = []
            predictions = self.model(input_ids_batch * attention_mask_batch)
            for i in range(input_ids_batch.shape[0]):
                inferences.append(self.mapping[str(predictions[i].argmax().item())])
            return inferences

        def postprocess(self, inference_output):
            return inference_output
    """,
    LINEAR,
    [{"data": bytearray(b"abcdefghijklmno p")}, {"body": "of words"}],
    ["Not Accepted", "Accepted"],
    files={
        "setup_config.json": json.dumps({"max_length": "2"}),
        "index_to_name.json": json.dumps({"0": "Not Accepted", "1": "Accepted"}),
    },
)
FUNCTION = make_case(
    """
    import torch
    from ts.torch_handler.base_handler import BaseHandler

    class ModelHandler(BaseHandler):
        def preprocess(self, data):
            return torch.tensor([row.get("data") or row.get("body") for row in data])

    _service = ModelHandler()

    def handle(data, context):
        try:
            if not _service.initialized:
                _service.initialize(context)
            if data is None:
                return None
            data = _service.preprocess(data)
            data = _service.inference(data)
            data = _service.postprocess(data)
            return data
        except Exception as e:
            raise Exception("Please provide a custom handler in the model archive." + str(e))
    """,
    LINEAR,
    [{"body": [1.0, 2.0]}, {"data": [3.0, 4.0]}],
    [[1.0, 20.0], [3.0, 40.0]],
)
MICRO_BATCHING = make_case(
    """
    import torch
    from ts.handler_utils.micro_batching import MicroBatching
    from ts.torch_handler.base_handler import BaseHandler

    class MicroBatchingHandler(BaseHandler):
        def __init__(self):
            super().__init__()
            self.handle = MicroBatching(self)

        def initialize(self, ctx):
            super().initialize(ctx)
            parallelism = ctx.model_yaml_config["micro_batching"].get("parallelism", None)
            if parallelism:
                self.handle.parallelism = parallelism
            micro_batch_size = ctx.model_yaml_config["micro_batching"].get("micro_batch_size", None)
            if micro_batch_size:
                self.handle.micro_batch_size = micro_batch_size

        def preprocess(self, data):
            return torch.tensor([row["body"] for row in data])

        def postprocess(self, data):
            return [[self.handle.get_micro_batch_idx(), *row] for row in data.tolist()]
    """,
    LINEAR,
    [{"body": [float(i), 1.0]} for i in range(5)],
    [[0, 0.0, 10.0], [0, 1.0, 10.0], [1, 2.0, 10.0], [1, 3.0, 10.0], [2, 4.0, 10.0]],
    config={"micro_batching": {"micro_batch_size": 2, "parallelism": {"preprocess": 2, "inference": 1}}},
)
METRICS = make_case(
    """
    import time

    import torch
    from ts.metrics.dimension import Dimension
    from ts.metrics.metric_type_enum import MetricTypes
    from ts.torch_handler.base_handler import BaseHandler

    class CustomMetrics(BaseHandler):
        def initialize(self, context):
            super().initialize(context)
            metrics = context.metrics
            metrics.add_metric_to_cache(
                metric_name="InitializeCallCount",
                unit="count",
                dimension_names=["ModelName", "Level", "Host"],
                metric_type=MetricTypes.COUNTER,
            )
            metrics.get_metric("InitializeCallCount", MetricTypes.COUNTER).add_or_update(
                1.0, [self.manifest["model"]["modelName"], "Model", "here"]
            )

        def preprocess(self, data):
            metrics = self.context.metrics
            for index, row in enumerate(data):
                metrics.add_size("SizeOfImage", len(row["body"]) / 1024, None, "kB")
                stage = Dimension("Stage", "preprocess")
                metrics.add_counter("RequestBatchSize", len(data), idx=index, dimensions=[stage])
            return torch.tensor([row["body"] for row in data])

        def postprocess(self, data):
            self.context.metrics.add_percent("ExamplePercentMetric", 50)
            return data.tolist()
    """,
    LINEAR,
    [{"body": [1.0, 2.0]}],
    [[1.0, 20.0]],
)
TEXT = make_case(
    """
    from ts.torch_handler.text_classifier import TextClassifier

    class Topic(TextClassifier):
        ngrams = 1

        def postprocess(self, data):
            answers = super().postprocess(data)
            return [max(answer, key=answer.get) for answer in answers]
    """,
    TOPICS,
    [{"data": bytearray(b"A Cat's <b>tale</b>")}],
    ["World"],
    files={
        "index_to_name.json": json.dumps({"0": "World", "1": "Sports"}),
        "source_vocab.pt": {"a": 1, "cat": 2, "is": 3, "tale": 3, "cats": 0},
    },
)
DETECTION = make_case(
    """
    import os

    import torch
    from ts.torch_handler.object_detector import ObjectDetector

    class CarefulDetector(ObjectDetector):
        def initialize(self, context):
            super().initialize(context)
            self.threshold = context.model_yaml_config["handler"]["threshold"]

        def postprocess(self, data):
            return [{"found": found} for found in super().postprocess(data)]
    """,
    DETECTOR,
    [{"data": bytearray(png(1, 2, 3, mode="RGB"))}],
    [{"found": [{"cat": [1.0, 2.0, 3.0, 4.0], "score": 0.75}, {"2": [5.0, 6.0, 7.0, 8.0], "score": 0.25}]}],
    files={"index_to_name.json": json.dumps({"1": "cat", "2": "2"})},
    config={"handler": {"threshold": 0.2}},
)
CASES = {
    "digit classifier": DIGIT_CLASSIFIER,
    "image classifier": TOP_ONE,
    "vision": VISION,
    "transformers": TRANSFORMERS,
    "function": FUNCTION,
    "micro-batching": MICRO_BATCHING,
    "metrics": METRICS,
    "text": TEXT,
    "detection": DETECTION,
}
MANIFEST = {"model": {"modelName": "m", "modelFile": "model.py", "handler": "handler.py"}}


def write(directory: Path, case: dict[str, Any]) -> None:
    (directory / "handler.py").write_text(textwrap.dedent(case["handler"]))
    (directory / "model.py").write_text(case["model"])
    for name, content in case.get("files", {}).items():
        if name.endswith(".pt"):
            torch.save(content, directory / name)
        else:
            (directory / name).write_text(content)


@pytest.fixture(autouse=True)
def install_names() -> Iterator[None]:
    """Install TorchServe's names while an archive runs."""
    finders = list(sys.meta_path)
    names.install()
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.split(".")[0] == "ts"]:
        del sys.modules[name]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_published_archives_run_unchanged(
    case: dict[str, Any], tmp_path: Path, begin: Callable[..., Context]
) -> None:
    write(tmp_path, case)
    entry = handlers.load("handler.py", tmp_path, MANIFEST)
    context = Context(
        "m", str(tmp_path), MANIFEST, metrics=MetricCache("m"), model_yaml_config=case.get("config", {})
    )
    entry.initialize(context)
    try:
        answers = entry(case["rows"], begin(context, len(case["rows"]), explain="False"))
    finally:
        if hasattr(entry.handle, "shutdown"):
            entry.handle.shutdown()
    assert json.loads(json.dumps(answers)) == case["answers"]
