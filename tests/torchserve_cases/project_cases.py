"""Cases of whole projects: what stands around a model in public repositories, with small models."""

from __future__ import annotations

import io
import pickle
import warnings

from tests.torchserve_cases.case import Case, Request, ask
from tests.torchserve_cases.payloads import make_base64_png, make_png, make_wave


def make_state() -> bytes:
    """Return the state_dict of a linear layer of two inputs, saved by torch."""
    import torch

    buffer = io.BytesIO()
    torch.save({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([0.5])}, buffer)
    return buffer.getvalue()


def make_script() -> bytes:
    import torch

    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(torch.nn.ReLU()), buffer)
    return buffer.getvalue()


def make_onnx() -> bytes:
    """Return a graph of one input ``x`` that is doubled."""
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", ports[:1], ports[1:])
    opset = [helper.make_opsetid("", 13)]
    return bytes(helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString())


LINEAR = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
"""

TOKENIZER = """
import json, re

class Tokenizer:
    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            self.ids = json.load(file)

    def __call__(self, text):
        return [self.ids.get(word, 0) for word in re.findall(r"\\w+", text.lower())]
"""

STAGES = """
import abc

class Stage(abc.ABC):
    @abc.abstractmethod
    def run(self, x): ...

class Double(Stage):
    def run(self, x):
        return 2 * x
"""

PROJECT_CASES = (
    Case(
        "tabular_regression",
        """
import torch
from ts.torch_handler.base_handler import BaseHandler

class Regressor(BaseHandler):
    def preprocess(self, data):
        return torch.tensor([row.get("data") or row.get("body") for row in data], dtype=torch.float32)

    def postprocess(self, output):
        return output.tolist()
""",
        (ask([1, 2]), ask([0, 0])),
        files={"model.py": LINEAR, "model.pt": make_state()},
        manifest={"modelFile": "model.py", "serializedFile": "model.pt"},
    ),
    Case(
        "own_loading_of_weights",
        """
import os, torch
from model import Net

class Service:
    def initialize(self, ctx):
        folder = ctx.system_properties["model_dir"]
        gpu = ctx.system_properties.get("gpu_id")
        self.device = torch.device("cuda:%s" % gpu if torch.cuda.is_available() else "cpu")
        self.model = Net().to(self.device)
        path = os.path.join(folder, ctx.manifest["model"]["serializedFile"])
        self.model.load_state_dict(torch.load(path, map_location=self.device))
        self.model.eval()

    def handle(self, data, ctx):
        rows = torch.tensor([row["body"]["features"] for row in data]).float()
        with torch.no_grad():
            return [{"score": round(float(value), 3)} for value in self.model(rows).flatten()]
""",
        (ask({"features": [1, 1]}),),
        files={"model.py": LINEAR, "model.pt": make_state()},
        manifest={"modelFile": "model.py", "serializedFile": "model.pt"},
    ),
    Case(
        "torchscript_with_the_base_handler",
        """
import torch
from ts.torch_handler.base_handler import BaseHandler

class Handler(BaseHandler):
    def preprocess(self, data):
        return torch.as_tensor([row["body"] for row in data], dtype=torch.float32)

    def postprocess(self, data):
        return data.numpy().tolist()
""",
        (ask([-1, 2]),),
        files={"model.pt": make_script()},
        manifest={"serializedFile": "model.pt"},
    ),
    Case(
        "onnx_session",
        """
import numpy as np
from ts.torch_handler.base_handler import BaseHandler

class Handler(BaseHandler):
    def preprocess(self, data):
        return np.array([row["body"] for row in data], np.float32)

    def inference(self, x):
        name = self.model.get_inputs()[0].name
        output = self.model.get_outputs()[0].name
        assert hasattr(self.model, "run")
        return self.model.run([output], {name: x})[0]

    def postprocess(self, y):
        return y.tolist()
""",
        (ask([1, 2]),),
        files={"model.onnx": make_onnx()},
        manifest={"serializedFile": "model.onnx"},
    ),
    Case(
        "several_models_in_one_archive",
        """
import json, os, pickle

class Ensemble:
    def initialize(self, ctx):
        folder = ctx.system_properties["model_dir"]
        with open(os.path.join(folder, "parts.json")) as file:
            names = json.load(file)
        self.parts = []
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                self.parts.append(pickle.load(file))

    def handle(self, data, ctx):
        return [sum(part["weight"] * row["body"]["x"] for part in self.parts) for row in data]
""",
        (ask({"x": 10}),),
        files={
            "parts.json": '["a.pkl", "b.pkl"]',
            "a.pkl": pickle.dumps({"weight": 0.25}),
            "b.pkl": pickle.dumps({"weight": 0.5}),
        },
    ),
    Case(
        "scikit_learn_pipeline",
        """
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

class Classifier:
    def initialize(self, ctx):
        x = np.array([[0.0], [1.0], [2.0], [3.0]])
        self.model = make_pipeline(StandardScaler(), LogisticRegression()).fit(x, [0, 0, 1, 1])

    def handle(self, data, ctx):
        return [{"label": int(self.model.predict([row["body"]])[0])} for row in data]
""",
        (ask([0.1]), ask([2.9])),
    ),
    Case(
        "recommendation",
        """
import torch

class Recommender:
    def initialize(self, ctx):
        torch.manual_seed(0)
        self.items = torch.nn.Embedding.from_pretrained(torch.eye(4))
        self.names = ctx.model_yaml_config["names"]

    def handle(self, data, ctx):
        answers = []
        for row in data:
            liked = torch.tensor(row["body"]["liked"])
            scores = self.items.weight @ self.items(liked).mean(0)
            best = scores.topk(row["body"].get("k", 2)).indices.sort().values
            answers.append([self.names[i] for i in best.tolist()])
        return answers
""",
        (ask({"liked": [1, 2]}),),
        config={"names": ["a", "b", "c", "d"]},
    ),
    Case(
        "detection_with_base64_images",
        """
import base64, io
from PIL import Image, ImageOps

class Detector:
    def initialize(self, ctx):
        self.limit = int(ctx.model_yaml_config["handler"]["limit"])

    def handle(self, data, ctx):
        answers = []
        for row in data:
            body = row.get("data") or row.get("body")
            body = base64.b64decode(body) if isinstance(body, str) else body
            image = Image.open(io.BytesIO(body)).convert("L")
            box = ImageOps.autocontrast(image).point(lambda p: 255 if p > self.limit else 0).getbbox()
            answers.append({"box": list(box), "size": list(image.size)})
        return answers
""",
        (
            Request(make_png(), {"Content-Type": "image/png"}),
            Request(make_base64_png(), {"Content-Type": "text/plain"}),
            ask(make_base64_png().decode()),
        ),
        config={"handler": {"limit": "100"}},
    ),
    Case(
        "speech_of_a_wave_file",
        """
import io, wave
import numpy as np

class Speech:
    def initialize(self, ctx):
        pass

    def handle(self, data, ctx):
        answers = []
        for row in data:
            with wave.open(io.BytesIO(bytes(row["body"]))) as file:
                samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
                answers.append({"rate": file.getframerate(), "peak": int(np.abs(samples).max())})
        return answers
""",
        (Request(make_wave(), {"Content-Type": "audio/wav"}),),
    ),
    Case(
        "own_tokenizer",
        """
import os
from tokenizer_of_mine import Tokenizer

class Service:
    def initialize(self, ctx):
        self.tokenizer = Tokenizer(os.path.join(ctx.system_properties.get("model_dir"), "vocab.json"))

    def handle(self, data, ctx):
        texts = [row.get("data") or row.get("body") for row in data]
        texts = [t.decode("utf-8") if isinstance(t, (bytes, bytearray)) else t for t in texts]
        return [self.tokenizer(text) for text in texts]
""",
        (
            Request("Größe und Maß".encode()),
            Request("Größe".encode(), {"Content-Type": "text/plain"}),
        ),
        files={"tokenizer_of_mine.py": TOKENIZER, "vocab.json": '{"größe": 1, "und": 2, "maß": 3}'},
    ),
    Case(
        "text_generation_in_steps",
        """
import torch

class Generator:
    def initialize(self, ctx):
        torch.manual_seed(1)
        self.table = torch.eye(5).roll(1, 1)

    @torch.inference_mode()
    def handle(self, data, ctx):
        answers = []
        for row in data:
            token, tokens = row["body"]["start"], []
            for _ in range(row["body"].get("max_new_tokens", 3)):
                token = int(self.table[token].argmax())
                tokens.append(token)
            answers.append({"tokens": tokens})
        return answers
""",
        (ask({"start": 0}), ask({"start": 3, "max_new_tokens": 4})),
    ),
    Case(
        "stages_of_a_base_class_of_their_own",
        """
import logging
from stages import Double
from ts.torch_handler.base_handler import BaseHandler

logger = logging.getLogger(__name__)

class Pipeline(BaseHandler):
    def initialize(self, context):
        self.manifest = context.manifest
        self.stages = [Double(), Double()]
        self.initialized = True

    def preprocess(self, data):
        return [row["body"] for row in data]

    def inference(self, data, *args, **kwargs):
        for stage in self.stages:
            data = [stage.run(x) for x in data]
        return data

    def postprocess(self, data):
        logger.info("done %d", len(data))
        return data
""",
        (ask(3),),
        files={"stages.py": STAGES},
    ),
)
