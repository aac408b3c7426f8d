"""Cases of public reports about TorchServe; README.md has the report of each."""

from __future__ import annotations

from tests.torchserve_cases.case import Case, Request, ask, form
from tests.torchserve_cases.payloads import make_png, make_zip
from tests.torchserve_cases.project_cases import make_state
from tests.torchserve_cases.python_cases import each

FILE = (
    b'Content-Disposition: form-data; name="%s"; filename="%s.png"\r\nContent-Type: image/png\r\n\r\n%s\r\n'
)
TRANSFORMER = """
from abc import ABC
import json, os
from ts.torch_handler.base_handler import BaseHandler

class H(BaseHandler, ABC):
    def __init__(self):
        super(H, self).__init__()
        self.initialized = False

    def initialize(self, ctx):
        self.manifest = ctx.manifest
        folder = ctx.system_properties.get("model_dir")
        with open(os.path.join(folder, "setup_config.json")) as file:
            self.setup_config = json.load(file)
        self.words = open(os.path.join(folder, "vocab.txt")).read().split()
        self.initialized = True

    def preprocess(self, requests):
        texts = []
        for data in requests:
            text = data.get("data") or data.get("body")
            texts.append(text.decode("utf-8") if isinstance(text, (bytes, bytearray)) else text)
        longest = int(self.setup_config["max_length"])
        return [[self.words.index(w) for w in text.split() if w in self.words][:longest] for text in texts]

    def inference(self, batch):
        return [sum(ids) % 2 for ids in batch]

    def postprocess(self, answers):
        return [self.setup_config["labels"][answer] for answer in answers]
"""
FOUR_FUNCTIONS = """
import json
import torch

def model_fn(model_dir):
    model = torch.nn.Linear(2, 1)
    model.load_state_dict(torch.load(model_dir + "/weights.pth"))
    return model.eval()

def input_fn(body, content_type):
    assert content_type == "application/json", content_type
    return torch.tensor(body if isinstance(body, list) else json.loads(body), dtype=torch.float32)

def predict_fn(rows, model):
    with torch.inference_mode():
        return model(rows)

def output_fn(values, accept):
    return json.dumps(values.tolist())
"""
IRIS = """
import io, json, logging
import pandas as pd
from ts.torch_handler.base_handler import BaseHandler

logger = logging.getLogger(__name__)

class IrisClassifierHandler(BaseHandler):
    def initialize(self, ctx):
        with open(ctx.system_properties["model_dir"] + "/index_to_name.json") as file:
            self.mapping = json.load(file)

    def preprocess(self, data):
        text = data[0].get("data") or data[0].get("body")
        text = text.decode("utf-8") if isinstance(text, (bytes, bytearray)) else json.dumps(text)
        return pd.DataFrame(json.loads(text)["data"])

    def inference(self, frame):
        return (frame.sum(axis=1) > 12).astype(int).tolist()

    def postprocess(self, output):
        return [self.mapping[str(output[0])]]
"""

REPORT_CASES = (
    Case(
        "opencv_of_requirements",
        """
import cv2
import numpy as np

class Detector:
    def initialize(self, ctx):
        self.kernel = np.ones((3, 3), np.uint8)

    def handle(self, data, ctx):
        answers = []
        for row in data:
            body = row.get("data") or row.get("body")
            image = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_GRAYSCALE)
            mask = cv2.dilate(cv2.threshold(image, 100, 255, cv2.THRESH_BINARY)[1], self.kernel)
            contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
            answers.append([list(map(int, cv2.boundingRect(contour))) for contour in contours])
        return answers
""",
        (Request(make_png(), {"Content-Type": "image/png"}),),
        files={"requirements.txt": "opencv-python-headless\n"},
        manifest={"requirementsFile": "requirements.txt"},
    ),
    Case(
        "overlay_drawn_by_opencv",
        """
import cv2
import numpy as np

def handle(data, ctx):
    if data is None:
        return None
    answers = []
    for row in data:
        image = cv2.imdecode(np.frombuffer(row["body"], np.uint8), cv2.IMREAD_COLOR)
        cv2.rectangle(image, (1, 1), (4, 4), (0, 0, 255), 1)
        answers.append(cv2.imencode(".bmp", image)[1].tobytes())
    ctx.set_response_content_type(0, "image/bmp")
    return answers
""",
        (Request(make_png(), {"Content-Type": "image/png"}),),
    ),
    Case(
        "images_of_one_form",
        """
import io
from PIL import Image

def handle(data, ctx):
    if data is None:
        return None
    sizes = [Image.open(io.BytesIO(image)).size for image in data[0].values()]
    return [{"images": len(sizes), "size": list(sizes[0])}]
""",
        (form([FILE % (name, name, make_png()) for name in (b"first", b"second")]),),
    ),
    Case(
        "byte_order_mark_of_a_vocabulary",
        each(
            "CHARACTERS.index(row['body'].decode())",
            "import os\nwith open('signs.txt', encoding='utf-8-sig') as file:\n"
            "    CHARACTERS = ''.join(file.read().splitlines())",
        ),
        (Request("字".encode()),),
        files={"signs.txt": "漢\n字\n".encode("utf-8-sig")},
    ),
    Case(
        "masked_method",
        """
from ts.torch_handler.base_handler import BaseHandler

class H(BaseHandler):
    def __init__(self):
        self.preprocess = None

    def initialize(self, ctx):
        self.initialized = True

    def handle(self, data, ctx):
        return [self.preprocess is None] * len(data)
""",
    ),
    Case(
        "negative_counter",
        """
from ts.metrics.dimension import Dimension

def handle(data, ctx):
    if data is None:
        return None
    dimensions = [Dimension("ModelName", "doc_model")]
    for value in (1, 2, -1):
        ctx.metrics.add_counter("LoopCount", value, None, dimensions)
    return ["counted"] * len(data)
""",
    ),
    Case(
        "metric_without_a_type",
        """
def handle(data, ctx):
    if data is None:
        return None
    ctx.metrics.add_metric("Generic", 10, unit="count", dimensions=[])
    ctx.metrics.add_metric("Other", 3.5, "0", "ms")
    return ["measured"] * len(data)
""",
    ),
    Case(
        "emitted_metrics",
        """
from ts.service import emit_metrics

def handle(data, ctx):
    if data is None:
        return None
    ctx.metrics.add_counter("Requests", 1)
    emit_metrics(ctx.metrics.store)
    return ["emitted"] * len(data)
""",
    ),
    Case(
        "level_of_the_root_logger",
        each("logging.getLogger().level", "import logging\nlogging.basicConfig(level=logging.DEBUG)"),
    ),
    Case(
        "relative_import", "from .helper import f\n" + each("f()"), files={"helper.py": "def f(): return 1\n"}
    ),
    Case(
        "package_of_an_archive_in_the_path",
        """
import os, sys, zipfile

class H:
    def initialize(self, ctx):
        folder = ctx.system_properties["model_dir"]
        with zipfile.ZipFile(os.path.join(folder, "source.zip")) as source:
            source.extractall(folder)
        sys.path.append(os.path.join(folder, "SSDC"))
        from Network.parts import WIDTH
        self.width = WIDTH

    def handle(self, data, ctx):
        return [self.width] * len(data)
""",
        files={
            "source.zip": make_zip(
                {
                    "SSDC/Network/__init__.py": "",
                    "SSDC/Network/parts.py": "from Network.sizes import WIDTH\n",
                    "SSDC/Network/sizes.py": "WIDTH = 7\n",
                }
            )
        },
    ),
    Case(
        "generalized_transformer",
        TRANSFORMER,
        (Request(b"good bad good"), ask({"data": "x"}), Request(b"bad")),
        files={
            "setup_config.json": '{"max_length": "2", "labels": ["negative", "positive"]}',
            "vocab.txt": "bad good",
        },
    ),
    Case(
        "functions_of_sagemaker",
        """
import importlib, os
from ts.torch_handler.base_handler import BaseHandler

class H(BaseHandler):
    def initialize(self, ctx):
        self.functions = importlib.import_module("inference")
        self.model = self.functions.model_fn(ctx.system_properties["model_dir"])

    def handle(self, data, ctx):
        answers = []
        for index, row in enumerate(data):
            content_type = ctx.get_request_header(index, "Content-Type")
            values = self.functions.input_fn(row.get("body"), content_type)
            answers.append(self.functions.output_fn(self.functions.predict_fn(values, self.model), "*/*"))
        ctx.set_response_content_type(0, "application/json")
        return answers
""",
        (ask([[1, 2], [0, 1]]),),
        files={"inference.py": FOUR_FUNCTIONS, "weights.pth": make_state()},
    ),
    Case(
        "iris_of_mlflow",
        IRIS,
        (ask({"data": [[5.1, 3.5, 1.4, 0.2]]}), Request(b'{"data": [[6.7, 3.1, 5.6, 2.4]]}')),
        files={"index_to_name.json": '{"0": "SETOSA", "1": "VIRGINICA"}'},
    ),
    Case(
        "entities_of_one_document",
        """
import re
from collections import defaultdict

class Service:
    initialized = False

    def initialize(self, ctx):
        self.pattern = re.compile(r"[A-Z]\\w+")
        self.initialized = True

    def inference(self, data):
        found = defaultdict(list)
        for word in self.pattern.findall(data[0].get("body").decode()):
            found["NAME"].append(word)
        return found

_service = Service()

def handle(data, context):
    if not _service.initialized:
        _service.initialize(context)
    if data is None:
        return None
    return [{"predictions": _service.inference(data)}]
""",
        (Request(b"Ada met Grace"),),
    ),
    Case(
        "key_of_a_customer",
        """
def handle(data, ctx):
    if data is None:
        return None
    answers = []
    for index, row in enumerate(data):
        if ctx.get_request_header(index, "X-Customer-Key") != "secret":
            ctx.set_response_status(code=401, phrase="unknown key", idx=index)
            answers.append("unknown key")
        else:
            answers.append("welcome")
    return answers
""",
        (Request(headers={"X-Customer-Key": "secret"}), Request()),
    ),
    Case(
        "model_of_the_first_request",
        """
import threading

model = None
lock = threading.Lock()

def handle(data, ctx):
    global model
    if data is None:
        return None
    with lock:
        if model is None:
            model = {"loads": 0}
        model["loads"] += 1
    return [model["loads"]] * len(data)
""",
        (Request(), Request()),
    ),
    Case(
        "cache_folder_of_the_environment",
        """
import os

os.environ["TORCH_HOME"] = os.path.join(os.getcwd(), "cache")
os.makedirs(os.environ["TORCH_HOME"], exist_ok=True)

import torch

def handle(data, ctx):
    if data is None:
        return None
    home = torch.hub.get_dir()
    return [os.path.relpath(home, ctx.system_properties["model_dir"])] * len(data)
""",
    ),
    Case(
        "data_loader_with_a_process",
        """
import torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.tensor(self.rows[index], dtype=torch.float32)

def handle(data, ctx):
    if data is None:
        return None
    loaders = [DataLoader(Rows(row["body"]), batch_size=2, num_workers=1) for row in data]
    return [[batch.sum().item() for batch in loader] for loader in loaders]
""",
        (ask([[1, 2], [3, 4], [5, 6]]),),
    ),
    Case(
        "device_of_properties",
        """
import torch

class H:
    def initialize(self, ctx):
        properties = ctx.system_properties
        gpu = torch.cuda.is_available() and properties.get("gpu_id") is not None
        self.map_location = "cuda" if gpu else "cpu"
        self.device = torch.device(self.map_location + ":" + str(properties.get("gpu_id")) if gpu else "cpu")

    def handle(self, data, ctx):
        return [str(self.device)] * len(data)
""",
    ),
    Case(
        "error_of_the_author",
        """
class TooLong(ValueError):
    def __init__(self, length):
        super().__init__(f"too long: {length}")

def handle(data, ctx):
    if data is None:
        return None
    for row in data:
        if len(row["body"]) > 3:
            raise TooLong(len(row["body"]))
    return ["short"] * len(data)
""",
        (Request(b"1234"), Request(b"123")),
    ),
)
