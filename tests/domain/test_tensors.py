"""Tensors in their three forms: each way and back is the identity; what is wrong is refused before it
costs memory.
"""

from __future__ import annotations

import json
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from serve_app.domain import tensors
from serve_app.domain.request import InputPart
from serve_app.domain.signature import DATATYPES, Signature, TensorSpec
from serve_app.domain.tensors import Tensor
from serve_app.errors import InvalidInput

_NUMPY = {
    "BOOL": np.bool_,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    **{
        f"{kind.upper()}{bits}": np.dtype(f"{kind}{bits}")
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}
_SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def made(draw: st.DrawFn, datatypes: list[str]) -> Tensor:
    datatype, shape = draw(st.sampled_from(datatypes)), draw(_SHAPES)
    if datatype == "BYTES":
        texts = st.text(st.characters(exclude_categories=["Cs"])).map(str.encode)
        elements = draw(st.lists(texts, min_size=math.prod(shape), max_size=math.prod(shape)))
        return tensors.from_bytes("x", datatype, shape, tensors.encode_elements(elements))
    if datatype == "BF16":
        bits = draw(
            arrays.arrays(np.uint16, shape).filter(lambda b: not ((b & 0x7FFF) > 0x7F80).any())
        )  # of NaNs: one
        return tensors.from_bytes("x", datatype, shape, bits.tobytes())
    return tensors.from_array("x", draw(arrays.arrays(_NUMPY[datatype], shape)))


@given(made(list(DATATYPES)))
def test_arrays_and_back(tensor: Tensor) -> None:
    array = tensor.to_array()
    assert array.shape == tensor.shape
    assert array.flags.writeable
    again = tensors.from_array("x", array, tensor.datatype)
    assert again == tensor or np.isnan(array.astype(np.float64)).any()
    np.testing.assert_array_equal(again.to_array(), array)


@given(made(list(DATATYPES)))
def test_raw_bytes_and_back(tensor: Tensor) -> None:
    assert tensors.from_bytes("x", tensor.datatype, list(tensor.shape), tensor.data) == tensor
    assert tensors.from_content_type("x", tensor.data, tensor.content_type) == tensor
    assert (
        tensors.from_list("x", tensor.datatype, tensor.shape, tensor.to_list()) == tensor
        if _finite(tensor)
        else True
    )


@given(made([name for name in DATATYPES if name not in ("FP16", "BF16")]), st.booleans())
def test_json_and_back(tensor: Tensor, nested: bool) -> None:
    assume(_finite(tensor))
    data = json.loads(tensor.to_json())
    if nested and 0 not in tensor.shape:
        array = np.array(data, object)
        data = array.reshape(tensor.shape).tolist()
    again = tensors.from_list("x", tensor.datatype, tensor.shape, data)
    if tensor.datatype == "BYTES":
        assert again == tensor
    else:
        np.testing.assert_array_equal(again.to_array(), tensor.to_array())


@given(st.lists(made(list(DATATYPES)), max_size=4))
def test_packed_and_back(several: list[Tensor]) -> None:
    assert tensors.unpack(tensors.pack(several)) == tuple(several)


def _finite(tensor: Tensor) -> bool:
    return tensor.datatype not in ("FP16", "BF16")


@given(st.binary(max_size=64), st.sampled_from(list(DATATYPES)), st.lists(st.integers(-1, 2**70), max_size=3))
@settings(max_examples=300)
def test_whatever_comes_is_a_tensor_or_refused(data: bytes, datatype: str, shape: list[int]) -> None:
    try:
        tensor = tensors.from_bytes("x", datatype, shape, data)
    except InvalidInput:
        return
    assert tensor.to_array().shape == tuple(shape)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=8
)


@given(_JSON, st.sampled_from(list(DATATYPES)), st.lists(st.integers(0, 3), max_size=3))
@settings(max_examples=300)
def test_whatever_json_says_is_a_tensor_or_refused(data: object, datatype: str, shape: list[int]) -> None:
    try:
        tensor = tensors.from_list("x", datatype, shape, data)
    except InvalidInput:
        return
    assert tensor.to_array().shape == tuple(shape)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "words"),
    [
        ("FP32", [2, 2], [1, 2, 3], "4 elements, and 3 came"),
        ("FP32", [2, 2], [[1, 2], [3]], "the nesting of its data differs from its shape [2, 2]"),
        ("FP32", [2], [[1], [2]], "the nesting of its data differs from its shape [2]"),
        ("FP32", [1], [True], "True in its data is none"),
        ("FP32", [1], [1e39], "no room for"),
        ("INT8", [1], [128], "INT8 has no room for"),
        ("UINT8", [1], [-1], "no room for"),
        ("INT32", [1], [1.5], "1.5 in its data is none"),
        ("FP64", [1], [10**400], "no room for"),
        ("BOOL", [1], [1], "is BOOL, and 1"),
        ("BYTES", [1], [5], "is BYTES, and 5"),
        ("BYTES", [1], ["\ud800"], "no Unicode"),
        ("FP16", [1], [1.0], "binary_data_size"),
        ("FP8", [1], [1.0], "there are BOOL"),
        (["FP32"], [1], [1.0], "datatype is"),
        ("FP32", [-1], [1.0], "lengths from 0"),
        ("FP32", [True], [1.0], "lengths from 0"),
        ("FP32", "1", [1.0], "lengths from 0"),
        ("FP32", [1] * 33, [1.0], "at most 32"),
        ("FP32", [2**62], [], "no memory holds"),
        ("FP32", [1], "1", "it is a list"),
        ("FP32", [1], None, "it is a list"),
    ],
)
def test_json_that_is_refused(datatype: str, shape: list, data: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words.replace("[", r"\[").replace("]", r"\]")) as refused:
        tensors.from_list("x", datatype, shape, data)
    assert "input x" in str(refused.value)


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("FP32", [2], b"\0" * 7),
        ("FP32", [2], b"\0" * 9),
        ("BYTES", [1], b"\5\0\0\0abcd"),
        ("BYTES", [1], b"\1\0\0\0a\0"),
        ("BYTES", [2], b"\1\0\0\0a"),
        ("BYTES", [1], b"\xff\xff\xff\xffa"),
        ("BYTES", [10**15], b"\0\0\0\0"),
    ],
)
def test_bytes_that_are_refused(datatype: str, shape: list[int], data: bytes) -> None:
    with pytest.raises(InvalidInput, match="bytes"):
        tensors.from_bytes("x", datatype, shape, data)


def test_an_absurd_shape_costs_nothing() -> None:
    tracemalloc.start()
    for shape in ([2**30, 2**30], [2**61], [10**9]):
        with pytest.raises(InvalidInput):
            tensors.from_bytes("x", "FP32", shape, b"\0\0\0\0")
        with pytest.raises(InvalidInput):
            tensors.from_list("x", "BYTES", shape, ["a"])
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_numbers_that_json_does_not_know() -> None:
    tensor = tensors.from_array("x", np.array([np.nan, np.inf, 1.5], np.float32))
    assert tensor.to_json() == b"[null,null,1.5]"
    with pytest.raises(InvalidInput, match="holds NaN or an infinity, which has no form in JSON"):
        tensor.to_json(nullify=False)
    assert tensors.from_array("x", np.array([1.5], np.float32)).to_json(nullify=False) == b"[1.5]"


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if "INT" in name])
def test_integers_written_as_floats(datatype: str) -> None:
    """Generated clients have one type of numbers."""
    made = tensors.from_list("x", datatype, [2], [3.0, 4])
    assert made == tensors.from_list("x", datatype, [2], [3, 4])
    for number in (3.5, math.nan, math.inf, 1e300):
        with pytest.raises(InvalidInput):
            tensors.from_list("x", datatype, [1], [number])


_PORTS = {
    "batched": [TensorSpec("x", "FP32", (-1, 4))],
    "fixed": [TensorSpec("x", "FP32", (3, 4))],
    "any": [TensorSpec("x", "FP32")],
    "none": [],
}


@pytest.mark.parametrize(
    ("ports", "shapes", "rows"),
    [
        ("batched", [(3, 4)], 3),
        ("fixed", [(3, 4)], 1),
        ("any", [(3, 4)], 3),
        ("none", [(3, 4), (3, 1)], 3),
        ("none", [(3, 4), (2, 4)], 1),
        ("none", [(3,)], 1),
        ("none", [()], 1),
        ("none", [], 1),
    ],
)
def test_rows_of_a_request(ports: str, shapes: list[tuple[int, ...]], rows: int) -> None:
    inputs = [InputPart(*Tensor(name, "FP32", shape, b"").to_part()) for name, shape in zip("xy", shapes)]
    signature = Signature(tuple(_PORTS[ports])) if ports != "none" else None
    assert tensors.count_rows(inputs, signature) == rows


def test_a_view_at_any_place_is_json() -> None:
    data = b"." + np.array([0.1, 2], np.float32).tobytes()
    assert Tensor("x", "FP32", (2,), memoryview(data)[1:]).to_json() == b"[0.1,2.0]"
    assert Tensor("x", "BOOL", (2,), b"\0\2").to_json() == b"[false,true]"
    assert Tensor("x", "FP64", (0,), b"").to_json() == b"[]"


@pytest.mark.parametrize(
    "tensor", [tensors.from_array("x", np.zeros(1, np.float16)), tensors.from_text(b"\xff", "x")]
)
def test_outputs_without_a_form_in_json(tensor: Tensor) -> None:
    with pytest.raises(InvalidInput, match=r"output x .*binary_data"):
        tensor.to_json()


def test_of_keeps_numbers_or_refuses() -> None:
    assert tensors.from_array("x", np.array([7]), "INT8").data == b"\7"
    assert tensors.from_array("x", np.array([1.5]), "FP32").datatype == "FP32"
    assert tensors.from_array("x", np.array([[1]], ">i4")).data == b"\1\0\0\0"
    for value, datatype in (
        ([300], "INT8"),
        ([1.5], "INT8"),
        ([1], "BYTES"),
        (["a"], "FP32"),
        ([1j], None),
        ([{}], None),
    ):
        with pytest.raises(ValueError, match=r"x|element"):
            tensors.from_array("x", np.array(value), datatype)


def test_bfloat16_rounds_to_the_nearest() -> None:
    numbers = np.array([1.0, 1.00390625, 1.01171875, 3.4e38, np.nan, -np.inf], np.float32)
    import torch

    theirs = torch.from_numpy(numbers).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(tensors.from_array("x", numbers, "BF16").to_array(), theirs)
