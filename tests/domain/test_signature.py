"""What a model takes: read from its file, and held against what came."""

from __future__ import annotations

import pytest

from serve_app.domain import signature, tensors
from serve_app.domain.signature import Signature, TensorSpec
from serve_app.errors import BadRequest, InvalidInput

_TWO = {
    "inputs": [
        {"name": "a", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "b", "datatype": "BYTES"},
    ],
    "outputs": [{"name": "y", "datatype": "INT64", "shape": [-1]}],
}


def _tensor(name: str, datatype: str, *shape: int) -> tensors.Tensor:
    return tensors.Tensor(name, datatype, shape, b"")


def test_read_and_written() -> None:
    read = signature.read(_TWO)
    assert read == Signature(
        (TensorSpec("a", "FP32", (-1, 3)), TensorSpec("b", "BYTES", None)), (TensorSpec("y", "INT64", (-1,)),)
    )
    written = signature.write(read)
    assert written["inputs"][1] == {"name": "b", "datatype": "BYTES", "shape": [-1]}
    assert written["outputs"] == _TWO["outputs"]


def test_any_length_and_any_number_of_axes() -> None:
    read = signature.read(_TWO)
    read.check([_tensor("b", "BYTES", 1, 2, 3), _tensor("a", "FP32", 0, 3)])
    read.check([_tensor("a", "FP32", 7, 3), _tensor("b", "BYTES")])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            [_tensor("a", "FP32", 1, 3)],
            "The input b is missing; the model takes a: FP32 [-1, 3], b: BYTES [...].",
        ),
        (
            [_tensor("a", "FP64", 1, 3)],
            "The input a is FP64 [1, 3], and is to be FP32 [-1, 3] (-1: any length).",
        ),
        ([_tensor("a", "FP32", 1, 4)], "The input a is FP32 [1, 4], and is to be FP32 [-1, 3]"),
        ([_tensor("a", "FP32", 3)], "is FP32 [3], and is to be"),
        ([_tensor("c", "FP32", 1, 3)], "There is no input 'c'; the model takes a"),
        ([_tensor("a", "FP32", 1, 3)] * 2, "There is no input 'a'"),
    ],
)
def test_what_does_not_fit_is_named(given: list, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        signature.read(_TWO).check(given)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "signature"),
        ({}, "inputs"),
        ({"inputs": []}, "names no input"),
        ({"inputs": [{"name": "a"}]}, "datatype"),
        ({"inputs": [{"name": "a", "datatype": "FLOAT"}]}, "there are BOOL"),
        ({"inputs": [{"name": "a", "datatype": "FP32", "shape": [-2]}]}, "lengths from -1"),
        ({"inputs": [{"name": "a", "datatype": "FP32", "shape": "x"}]}, "shape"),
        ({"inputs": [{"name": "", "datatype": "FP32"}]}, "has a name"),
        ({"inputs": [{"name": "a", "datatype": "FP32"}] * 2}, "twice"),
        ({"inputs": [{"name": "a", "datatype": "FP32", "dims": [1]}]}, "dims"),
        ({"input": [{"name": "a", "datatype": "FP32"}]}, "did you mean 'inputs'"),
    ],
)
def test_a_signature_that_is_none(document: object, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        signature.read(document)
