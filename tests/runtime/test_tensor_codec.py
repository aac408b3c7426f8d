"""Tensors at a handler: what it gets of them by the form that it takes, and what its answers become."""

from __future__ import annotations

import json

import numpy as np
import pytest

from serve_app.domain import tensors
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.domain.signature import Signature, TensorSpec
from serve_app.domain.tensors import Tensor
from serve_app.errors import HandlerFailed, HandlerRejected, InvalidInput, StartFailed, UnsupportedOutput
from serve_app.settings import RuntimeSettings

pytestmark = pytest.mark.integration


ECHO = (
    "def handle(data, context):\n    return None if data is None else [answer(row, context) for row in"
    " data]\n"
)
SIGNED = {
    "tensors": True,
    "signature": {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}],
    },
}


def tensor_call(*given: Tensor) -> InferenceRequest:
    return InferenceRequest(
        "m", None, tuple(InputPart(t.name, bytes(t.data), t.content_type) for t in given), kind="tensors"
    )


def json_call(value: object, name: str = "body") -> InferenceRequest:
    return InferenceRequest("m", None, (InputPart(name, json.dumps(value).encode(), "application/json"),))


@pytest.fixture
def ask(make_runner):
    """One batch to a handler whose ``answer(row, context)`` is written by the test; tensors or what else
    came back.
    """

    def run(
        answer: str,
        *requests: InferenceRequest,
        config: dict | None = None,
        settings: RuntimeSettings | None = None,
    ) -> list:
        runner = make_runner(f"import numpy as np\n{answer}\n{ECHO}", config=config or {}, settings=settings)
        runner.load()
        replies = runner.run(requests, lambda index, chunk: None)
        return [
            (
                tensors.unpack(reply.body)
                if getattr(reply, "content_type", None) == tensors.PACKED_MEDIA_TYPE
                else reply
            )
            for reply in replies
        ]

    return run


def result(reply: tuple[Tensor, ...]) -> dict:
    return {t.name: (t.datatype, list(t.shape), t.to_list()) for t in reply}


def test_a_model_of_tensors_gets_arrays_and_answers_with_them(ask) -> None:
    requests = [
        tensor_call(tensors.from_array("x", np.full((n, 2), n, np.float32)), tensors.from_text(b"\xff", "t"))
        for n in (1, 3)
    ]
    answer = (
        "def answer(row, context):\n    row['x'] += 1\n    return {'y': row['x'].sum(axis=1), 't': row['t']}"
    )
    first, second = ask(answer, *requests, config={"tensors": True})
    assert result(first) == {"y": ("FP32", [1], [4.0]), "t": ("BYTES", [1], [b"\xff"])}
    assert result(second)["y"] == ("FP32", [3], [8.0, 8.0, 8.0])


def test_outputs_get_the_datatype_of_the_signature(ask) -> None:
    answer = "def answer(row, context):\n    return {'y': [0.5], 'z': np.float64(2)}"
    [reply] = ask(answer, tensor_call(tensors.from_array("x", np.zeros((1, 2), np.float32))), config=SIGNED)
    assert result(reply) == {"y": ("FP32", [1], [0.5]), "z": ("FP64", [], [2.0])}


def test_torch_tensors_are_outputs_too(ask) -> None:
    answer = (
        "import torch\ndef answer(row, context):\n"
        "    return {'y': torch.ones(2, dtype=torch.bfloat16), 'z': torch.ones(1, requires_grad=True)}"
    )
    [reply] = ask(answer, tensor_call())
    assert result(reply) == {"y": ("BF16", [2], [1.0, 1.0]), "z": ("FP32", [1], [1.0])}


def test_a_model_of_tensors_takes_json_as_well(ask) -> None:
    answer = (
        "def answer(row, context):\n    assert row['x'].dtype == np.float32\n    return {'y':"
        " row['x'].sum(axis=1)}"
    )
    requests = [
        json_call({"x": [[1, 2]]}),
        json_call([[1, 2], [3, 4]]),
        InferenceRequest("m", None, (InputPart("x", b"[[5, 6]]"),)),  # a field of a form
    ]
    replies = ask(answer, *requests, config=SIGNED)
    assert [json.loads(reply.body) for reply in replies] == [{"y": [3.0]}, {"y": [3.0, 7.0]}, {"y": [11.0]}]


def test_without_a_signature_json_says_what_it_is(ask) -> None:
    answer = "def answer(row, context):\n    return {name: [str(value.dtype)] for name, value in row.items()}"
    [reply] = ask(
        answer, json_call({"a": [1.5], "b": [1], "c": [True], "d": ["x"]}), config={"tensors": True}
    )
    assert json.loads(reply.body) == {"a": ["float32"], "b": ["int64"], "c": ["bool"], "d": ["object"]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"x": [[1, 2, 3]]}, "FP32 [1, 3], and is to be FP32 [-1, 2]"),
        ({"x": [[1, 2], [3]]}, "differ in length"),
        ({"x": [["a", "b"]]}, "is FP32, and 'a'"),
        ({"z": [[1, 2]]}, "no input 'z'"),
        ({}, "x is missing"),
    ],
)
def test_json_that_does_not_fit_is_that_rows_error(ask, value: object, words: str) -> None:
    answer = "def answer(row, context):\n    return {'y': row['x'].sum(axis=1)}"
    good = json_call({"x": [[1, 2]]})
    first, wrong, last = ask(answer, good, json_call(value), good, config=SIGNED)
    assert json.loads(first.body) == json.loads(last.body) == {"y": [3.0]}
    assert isinstance(wrong, InvalidInput)
    assert words in str(wrong)


def test_a_batch_of_none_that_can_be_read_never_comes_to_the_handler(ask) -> None:
    [wrong] = ask(
        "def answer(row, context):\n    raise SystemExit",
        InferenceRequest("m", None, (InputPart("body", b"{"),)),
        config=SIGNED,
    )
    assert isinstance(wrong, InvalidInput)
    assert "not JSON" in str(wrong)


def test_a_plain_handler_gets_values(ask) -> None:
    answer = "def answer(row, context):\n    return repr(sorted(row.items()))"
    [lone, two, many] = ask(
        answer,
        tensor_call(tensors.from_text(b"words", "INPUT0")),
        tensor_call(
            tensors.from_array("a", np.array([[1, 2]], np.int8)), tensors.from_array("b", np.array(0.5))
        ),
        tensor_call(tensors.from_array("t", np.array([b"x", b"y"], object))),
    )
    [text] = lone
    assert (text.name, text.to_list()) == (
        "output-0",
        [b"[('INPUT0', bytearray(b'words')), ('data', bytearray(b'words'))]"],
    )
    assert two[0].to_list() == [b"[('a', [[1, 2]]), ('b', 0.5)]"]
    assert many[0].to_list() == [b"[('data', [b'x', b'y']), ('t', [b'x', b'y'])]"]


@pytest.mark.parametrize(
    ("value", "output"),
    [
        ("[[1, 2], [3, 4]]", ("INT64", [2, 2], [1, 2, 3, 4])),
        ("[0.5, 1]", ("FP64", [2], [0.5, 1.0])),
        ("[True]", ("BOOL", [1], [True])),
        ("0.25", ("FP64", [1], [0.25])),
        ("np.ones((1, 2), np.float16)", ("FP16", [1, 2], [1.0, 1.0])),
        ("'words'", ("BYTES", [1], [b"words"])),
        ("b'\\xff'", ("BYTES", [1], [b"\xff"])),
        ("[[1, 2], [3]]", ("BYTES", [1], [json.dumps([[1, 2], [3]], indent=2).encode()])),
        ("['a']", ("BYTES", [1], [json.dumps(["a"], indent=2).encode()])),
        ("{'cat': 0.9}", ("BYTES", [1], [json.dumps({"cat": 0.9}, indent=2).encode()])),
        ("[]", ("BYTES", [1], [b"[]"])),
    ],
)
def test_what_a_plain_handler_answers(ask, value: str, output: tuple) -> None:
    [reply] = ask(f"def answer(row, context):\n    return {value}", tensor_call(tensors.from_text(b"")))
    assert result(reply) == {"output-0": output}


def test_an_envelope_of_the_protocol_gets_its_document(ask) -> None:
    answer = (
        "def answer(row, context):\n    return [sum(row['data'][0])] if row['name'] == 'x' else row['data']"
    )
    request = tensor_call(tensors.from_array("x", np.array([[1, 2]], np.int32)), tensors.from_text(b"t", "t"))
    [reply] = ask(answer, request, settings=RuntimeSettings(service_envelope="kservev2"))
    assert result(reply) == {"x": ("INT64", [1], [3]), "t": ("BYTES", [1], [b"t"])}


def test_an_answer_that_is_no_tensor_is_its_rows_error(ask) -> None:
    answer = "def answer(row, context):\n    return {'y': row['x'] * (1j if row['x'][0] else 1)}"
    good, bad = ask(
        answer,
        *(tensor_call(tensors.from_array("x", np.array([n]))) for n in (0, 1)),
        config={"tensors": True},
    )
    assert result(good)["y"] == ("INT64", [1], [0])
    assert isinstance(bad, UnsupportedOutput)


def test_words_under_a_status_are_no_tensors(ask) -> None:
    answer = "def answer(row, context):\n    context.set_response_status(422, idx=0)\n    return 'too dark'"
    [reply] = ask(answer, tensor_call())
    assert (reply.status, reply.body) == (422, b"too dark")


def test_a_stream_is_of_bytes(make_runner) -> None:
    pieces = []
    runner = make_runner(
        "def handle(data, context):\n    if data:\n        context.emit(0, 'a')\n    return ['b'] if data"
        " else None"
    )
    runner.load()
    [last] = runner.run([tensor_call()], lambda index, chunk: pieces.append(chunk))
    assert [chunk.body for chunk in [*pieces, last]] == [b"a", b"b"]


OFFERS = """
import torchrelay

class H:
    signature = {}

    def initialize(self, context):
        pass

    def handle(self, data, context):
        pass
"""


def test_what_a_handler_offers_as_its_signature(make_runner) -> None:
    runner = make_runner(
        OFFERS.replace("{}", "{'inputs': [{'name': 'x', 'datatype': 'INT8', 'shape': [2]}]}")
    )
    runner.load()
    assert runner.signature == Signature((TensorSpec("x", "INT8", (2,)),))


def test_a_signature_that_is_none_stops_the_start(make_runner) -> None:
    with pytest.raises(StartFailed) as failed:
        make_runner(OFFERS.replace("{}", "{'inputs': []}")).load()
    assert "names no input" in failed.value.detail


def test_a_signature_of_an_author_of_torchserve_is_left_alone(make_runner) -> None:
    runner = make_runner(OFFERS.replace("import torchrelay", "").replace("{}", "{'inputs': []}"))
    runner.load()
    assert runner.signature is None


def test_another_attribute_of_that_name_is_left_alone(make_runner) -> None:
    runner = make_runner(OFFERS.replace("{}", "5"))
    runner.load()
    assert runner.signature is None


def test_errors_of_handlers_stay_theirs(ask) -> None:
    answer = (
        "from handlers import PredictionException\n"
        "def answer(row, context):\n    return PredictionException('no cat', 404) if row['data'] else 1 / 0"
    )
    [refused] = ask(answer, tensor_call(tensors.from_text(b"x")))
    assert isinstance(refused, HandlerRejected)
    [failed] = ask(answer, tensor_call(tensors.from_text(b"")))
    assert isinstance(failed, HandlerFailed)
