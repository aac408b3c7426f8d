"""Answers of numbers that stay arrays until they are written."""

import json

import numpy
import pytest

from serve_app.domain import tensors
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.errors import BatchSizeMismatch, HandlerRejected, InvalidOutput, UnsupportedOutput
from serve_app.runtime import codec
from serve_app.settings import RuntimeSettings

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 1e-6]))

    def forward(self, x):
        return x * self.scale
"""
PLAIN = """
from ts.torch_handler.base_handler import BaseHandler

class Net(BaseHandler):
    pass
"""
READS = """
from ts.torch_handler.base_handler import BaseHandler

class Net(BaseHandler):
    def postprocess(self, data):
        return [[type(row).__name__, *row] for row in super().postprocess(data)]
"""
WRAPS = """
from ts.torch_handler.base_handler import BaseHandler

class Net(BaseHandler):
    def handle(self, data, context):
        return [[type(row).__name__, *row] for row in super().handle(data, context)]
"""
ARRAY = """
import numpy

def handle(data, context):
    return data and numpy.array(eval(data[0]["body"]), "f4")
"""


def make_request(value, **fields):
    return InferenceRequest(
        "m", inputs=(InputPart("body", json.dumps(value).encode(), "application/json"),), **fields
    )


def nowhere(index, chunk):
    raise AssertionError("nothing streams here")


@pytest.fixture
def run(make_runner, monkeypatch):
    """``run(code, values, **runner's)``: the bodies of the answers, and how many rows were written out of
    an array.
    """
    counted = []
    dumps_rows = codec.dumps_rows
    monkeypatch.setattr(codec, "dumps_rows", lambda array: counted.append(len(array)) or dumps_rows(array))

    def ask(code, values, **known):
        runner = make_runner(code, {"model.py": MODEL}, model={"modelFile": "model.py"}, **known)
        runner.load()
        counted.clear()
        answers = runner.run([make_request(value) for value in values], nowhere)
        return [answer.body if isinstance(answer, InferenceResponse) else answer for answer in answers], sum(
            counted
        )

    return ask


def lists(*values):
    return [json.dumps(numpy.array([x, y * 1e-6], "f4").tolist(), indent=2).encode() for x, y in values]


def load(*texts):
    return [json.loads(text) for text in texts]


VALUES = [1, 2], [0.5, -30]


def test_the_base_handlers_answer_is_its_list(run):
    answers, written = run(PLAIN, VALUES)
    assert load(*answers) == load(*lists(*VALUES))
    assert written == 2


@pytest.mark.parametrize("code", [READS, WRAPS], ids=["postprocess", "handle"])
def test_an_author_who_reads_answers_reads_lists(run, code):
    answers, written = run(code, VALUES)
    assert [json.loads(answer)[0] for answer in answers] == ["list", "list"] and written == 0


def test_an_envelope_reads_lists(run):
    answers, written = run(
        PLAIN, [{"instances": [[1, 2]]}], settings=RuntimeSettings(service_envelope="json")
    )
    assert json.loads(answers[0]) == {"predictions": [json.loads(lists([1, 2])[0])]} and written == 0


def test_a_rejected_row_leaves_the_others_as_they_are(run):
    answers, _ = run(PLAIN, [VALUES[0], "no numbers", VALUES[1]])
    assert load(answers[0], answers[2]) == load(*lists(*VALUES))
    assert isinstance(answers[1], HandlerRejected)


def test_micro_batches_come_together(run):
    config = {"micro_batching": {"micro_batch_size": 2}}
    values = [[n, n] for n in range(5)]
    answers, _ = run(PLAIN, values, config=config)
    assert load(*answers) == load(*lists(*values))


def test_a_call_of_tensors_gets_the_arrays_own_number_format(make_runner):
    code = "import numpy\n\ndef handle(data, context):\n    return numpy.ones((len(data or ()), 2), 'f4')"
    runner = make_runner(code)
    runner.load()
    given = tensors.from_array("x", numpy.ones(1, "f4"), None)
    requested = InferenceRequest(
        "m", inputs=(InputPart(given.name, bytes(given.data), given.content_type),), kind="tensors"
    )
    [packed] = runner.run([requested], nowhere)
    [tensor] = tensors.unpack(packed.body)
    assert (tensor.datatype, tensor.to_list()) == ("FP32", [1.0, 1.0])


def test_stopping_criteria_read_the_rows(make_runner):
    runner = make_runner(
        """
import numpy

def handle(data, context):
    if data:
        context.stopping_criteria = [lambda row: row.sum() > 1] * len(data)
        return numpy.array([[0.5, 0.25], [2.0, 1.0]], "f4")
""",
        continuous_batching=True,
    )
    runner.load()
    goes_on, ends = runner.run([make_request(1), make_request(2)], nowhere)
    assert (goes_on.last, ends.last) == (False, True)
    assert [json.loads(chunk.body) for chunk in (goes_on, ends)] == [[0.5, 0.25], [2.0, 1.0]]


@pytest.mark.parametrize(
    ("value", "count", "answers"),
    [
        ("[[1, 2], [3, 4]]", 2, [[1.0, 2.0], [3.0, 4.0]]),
        ("[1, 2]", 2, [1.0, 2.0]),
        ("[[1, 2]]", 2, BatchSizeMismatch),
        ("1", 1, InvalidOutput),
    ],
)
def test_an_author_may_return_an_array_of_rows(run, value, count, answers):
    bodies, _ = run(ARRAY, [value] * count)
    if isinstance(answers, list):
        assert [json.loads(body) for body in bodies] == answers
    else:
        assert [type(body) for body in bodies] == [answers] * count


def test_a_row_of_an_array_that_cannot_be_sent_fails_alone(run):
    code = (
        "import numpy\n\ndef handle(data, context):\n    return data and numpy.array([[1, 2], [1j, 2]],"
        " object)"
    )
    (sound, bad), _ = run(code, [1, 2])
    assert json.loads(sound) == [1, 2]
    assert isinstance(bad, UnsupportedOutput)
