"""Files of weights as a replica meets them: what runs, in how many threads, and what is refused with its
cure.
"""

import io
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from onnx import TensorProto, helper

from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.errors import HandlerRejected, StartFailed
from serve_app.runtime.host import thread_limits
from serve_app.runtime.runner import Runner
from serve_app.settings import RuntimeSettings

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.linear(x)
"""
SPEC = ModelSpec("m", "1.0", url="m.mar", digest="", archive="")


@pytest.fixture
def runner(tmp_path, own_process):
    """``runner(handler, files, config, **manifest)``: a Runner over a directory with these files."""

    def make(handler, files, config=None, **model):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        spec = SPEC.with_(handler=handler, config=config or {}, batch_size=4)
        return Runner(spec, tmp_path, {"model": {"handler": handler, **model}}, RuntimeSettings())

    return make


def ask(runner, *values):
    requests = [
        InferenceRequest("m", inputs=(InputPart("body", json.dumps(value).encode(), "application/json"),))
        for value in values
    ]
    return runner.run(requests, emit=None)


def doubling() -> bytes:
    """X twice; a row of it are two numbers."""
    put, out = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [put], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    return model.SerializeToString()


def test_an_onnx_file_needs_no_code(runner):
    ran = runner("onnx", {"model.onnx": doubling()}, serializedFile="model.onnx")
    ran.load()
    good, wrong, other = ask(ran, [1, 2], [1, 2, 3], [0.5, -1])
    assert [json.loads(reply.body) for reply in (good, other)] == [[2, 4], [1, -2]]
    assert isinstance(wrong, HandlerRejected) and wrong.code == 400
    assert "has the shape [3]. The model takes x: float[n, 2]" in str(wrong)


def test_a_damaged_onnx_file_starts_nothing(runner):
    ran = runner("onnx", {"model.onnx": doubling()[:20]}, serializedFile="model.onnx")
    with pytest.raises(StartFailed) as raised:
        ran.load()
    assert "model.onnx: ONNX Runtime cannot load this. The file is damaged" in raised.value.detail


class Trap:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def test_a_pickle_that_is_not_trusted_runs_nothing(runner, tmp_path):
    buffer = io.BytesIO()
    torch.save({"linear.weight": torch.ones(1, 2), "linear.bias": Trap()}, buffer)
    for content in (buffer.getvalue(), pickle.dumps(Trap())):
        files = {"model.pt": content, "net.py": NET.encode()}
        ran = runner("base_handler", files, serializedFile="model.pt", modelFile="net.py")
        with pytest.raises(StartFailed) as raised:
            ran.load()
        assert "model.pt: this cannot be read as a state dict" in raised.value.detail
        assert "register the model with trusted=true" in raised.value.detail
        assert not (tmp_path / "unpickled").exists()


COUNTS = """
import os
import torch

class Counts:
    def initialize(self, context):
        self.threads = [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]]

    def handle(self, data, context):
        return [self.threads] * len(data)
"""


def test_the_configured_number_of_threads(runner, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    try:
        ran = runner("counts.py", {"counts.py": COUNTS.encode()}, {"threads": 3})
        ran.load()
        [reply] = ask(ran, None)
        assert json.loads(reply.body) == [3, "3"]
    finally:
        torch.set_num_threads(before)


def test_torch_that_is_loaded_already_has_the_threads_of_the_environment(runner, monkeypatch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)  # as in a fork: torch was imported before Ray set the variable
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        ran = runner("counts.py", {"counts.py": COUNTS.encode()})
        ran.load()
        [reply] = ask(ran, None)
        assert json.loads(reply.body) == [1, "1"]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ({}, {}),
        ({"OMP_NUM_THREADS": "1"}, {"TOKENIZERS_PARALLELISM": "false"}),
        ({"OMP_NUM_THREADS": "3"}, {"RAYON_NUM_THREADS": "3"}),
        ({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}, {"TOKENIZERS_PARALLELISM": "true"}),
        ({"OMP_NUM_THREADS": "3", "RAYON_NUM_THREADS": "8"}, {"RAYON_NUM_THREADS": "8"}),
    ],
)
def test_tokenizers_keep_to_the_threads_of_the_process(monkeypatch, given, then):
    monkeypatch.setattr(os, "environ", dict(given))
    thread_limits.limit_tokenizers()
    assert {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} == then


TOKENIZING = """
from tokenizers import Tokenizer, models, pre_tokenizers
import psutil

class Counts:
    def initialize(self, context):
        self.tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    def handle(self, data, context):
        before = psutil.Process().num_threads()
        self.tokenizer.encode_batch(["a a a a"] * 1000)
        return [psutil.Process().num_threads() - before] * len(data)
"""
ONE_THREAD = """
import sys
from handlers.context import Context
from serve_app.runtime.runner import Runner
from serve_app.settings import RuntimeSettings
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InputPart

spec = ModelSpec("m", "1.0", url="m.mar", digest="", archive="", handler="counts.py", config={"threads": 1})
runner = Runner(spec, sys.argv[1], {"model": {"handler": "counts.py"}}, RuntimeSettings())
runner.load()
[reply] = runner.run([InferenceRequest("m", inputs=(InputPart("body", b"x"),))], emit=None)
print(reply.body.decode())
"""


@pytest.mark.slow
def test_a_batch_of_texts_wakes_no_threads_where_the_model_has_one(tmp_path):
    (tmp_path / "counts.py").write_text(TOKENIZING)
    hidden = ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-c", ONE_THREAD, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1:] == ["0"], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("requested", "workers", "number"),
    [
        (None, (1, 1), None),
        (2, (4, 4), 2),
        ("auto", (1, 1), 8),
        ("auto", (3, 3), 2),
        ("auto", (1, 4), 2),  # the load may call for four
        ("auto", (16, 16), 1),
        ("auto", (0, 0), 8),
    ],
)
def test_the_cores_are_divided_among_the_replicas(requested, workers, number):
    spec = SPEC.with_(config={"threads": requested}, min_workers=workers[0], max_workers=workers[1])
    assert thread_limits.intra_op_threads(spec, cores=8) == number
