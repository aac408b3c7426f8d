"""The HTTP encoding of inferences: JSON, binary tensors, and invalid input."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.domain import tensors
from serve_app.errors import BadRequest
from serve_app.protocols.openinference import binary_codec
from tests.support.openinference_requests import build_document

pytestmark = pytest.mark.integration


def test_json_requests_and_responses(send_request: Any) -> None:
    response = send_request("POST", "/v2/models/identity/infer", build_document([[1.5, 2]], id="me"))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in response.headers
    assert response.json() == {
        "model_name": "identity",
        "model_version": "1.0",
        "id": "me",
        "outputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}],
    }


def test_data_beside_a_binary_size_is_ambiguous(send_request: Any) -> None:
    parameters = {"binary_data_size": 4}
    item = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0], "parameters": parameters}
    body = orjson.dumps({"inputs": [item]})
    length = {"inference_header_content_length": str(len(body))}
    response = send_request("POST", "/v2/models/identity/infer", body + bytes(4), **length)
    assert response.status_code == 400
    assert "has data, and its parameters binary_data_size" in response.json()["error"]


def test_a_generated_clients_numbers(send_request: Any) -> None:
    """Clients generated from the protocol's OpenAPI document write every number as a float."""
    item = {"name": "x", "datatype": "INT64", "shape": [1, 3], "data": [1.0, 2.0, -3.0], "parameters": None}
    body = {"id": None, "parameters": None, "inputs": [item], "outputs": None}
    response = send_request("POST", "/v2/models/identity/infer", body)
    assert response.status_code == 200
    assert response.json()["outputs"][0]["data"] == [1, 2, -3]
    nulls = {"content_type": "fp32", "x": None}
    with_nulls = {"inputs": [{**item, "parameters": nulls}], "parameters": {"headers": None, "n": 1}}
    assert send_request("POST", "/v2/models/identity/infer", with_nulls).status_code == 200
    nested = {"inputs": [{**item, "parameters": {"x": {}}}]}
    assert send_request("POST", "/v2/models/identity/infer", nested).status_code == 400
    for wrong in (1.5, 1e30):
        refused = send_request(
            "POST", "/v2/models/identity/infer", {"inputs": [{**item, "shape": [1], "data": [wrong]}]}
        )
        assert refused.status_code == 400


def test_nan_is_null_in_json(send_request: Any) -> None:
    response = send_request(
        "POST",
        "/v2/models/identity/infer",
        b'{"inputs": [{"name": "x", "datatype": "FP64", "shape": [2], "data": [NaN, -Infinity]}]}',
    )
    assert response.json()["outputs"][0]["data"] == [None, None]


def test_outputs_may_be_binary_or_json(send_request: Any) -> None:
    body = {
        "inputs": [
            {"name": "a", "datatype": "INT8", "shape": [2], "parameters": {"binary_data_size": 2}},
            {"name": "b", "datatype": "BYTES", "shape": [1], "data": ["text"]},
            {"name": "c", "datatype": "BF16", "shape": [1], "parameters": {"binary_data_size": 2}},
        ],
        "outputs": [{"name": "c"}, {"name": "b", "parameters": {"binary_data": False}}, {"name": "a"}],
        "parameters": {"binary_data_output": True},
    }
    header = orjson.dumps(body)
    response = send_request(
        "POST",
        "/v2/models/identity/infer",
        header + b"\1\2" + b"\x80\x3f",
        inference_header_content_length=str(len(header)),
    )
    size = int(response.headers["inference-header-content-length"])
    assert response.headers["content-type"] == "application/octet-stream"
    document = orjson.loads(response.content[:size])
    assert [o["name"] for o in document["outputs"]] == ["c", "b", "a"]
    assert [o.get("parameters") for o in document["outputs"]] == [
        {"binary_data_size": 4},
        None,
        {"binary_data_size": 2},
    ]
    assert response.content[size:] == struct.pack("<f", 1.0) + b"\1\2"


@pytest.mark.parametrize("size", [1, 5_000])
@pytest.mark.parametrize("name", ["x", "n" * 600])
@pytest.mark.parametrize("id", ["", "me"])
def test_binary_outputs_do_not_depend_on_being_named(
    send_request: Any, size: int, name: str, id: str
) -> None:
    inputs = [
        {"name": f"{name}{i}", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
        for i in range(2)
    ]
    body = {"inputs": inputs, "parameters": {"binary_data_output": True}, **({"id": id} if id else {})}
    responses = []
    for fields in ({}, {"outputs": [{"name": item["name"]} for item in inputs]}, {}):
        header = orjson.dumps({**body, **fields})
        raw = bytes(i % 251 for i in range(2 * size))
        length = str(len(header))
        responses.append(
            send_request(
                "POST", "/v2/models/identity/infer", header + raw, inference_header_content_length=length
            )
        )
    lengths = {int(response.headers["inference-header-content-length"]) for response in responses}
    assert len(lengths) == len({response.content for response in responses}) == 1
    assert responses[0].content[lengths.pop() :] == raw


def test_a_body_may_be_one_raw_tensor(send_request: Any) -> None:
    raw = np.arange(4, dtype=np.float32).tobytes()
    response = send_request("POST", "/v2/models/signed/infer", raw, inference_header_content_length="0")
    size = int(response.headers["inference-header-content-length"])
    assert np.frombuffer(response.content[size:], np.float32).tolist() == [1.0, 5.0]
    assert (
        "exactly one input"
        in send_request("POST", "/v2/models/identity/infer", raw, inference_header_content_length="0").json()[
            "error"
        ]
    )


JSON_BODY = orjson.dumps(build_document([1.0]))
BINARY_HEADER = orjson.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}]}
)


@pytest.mark.parametrize(
    ("body", "length", "message"),
    [
        (b"", None, "not JSON"),
        (b"{", None, "not JSON"),
        (b"[]", None, "is a JSON object"),
        (b"[" * 100_000, None, "not JSON"),
        (b"{}", None, "inputs is None"),
        (b'{"inputs": [1]}', None, "a list of objects"),
        (b'{"inputs": [{}]}', None, "name is None"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}]}', None, "no data"),
        (b'{"inputs": [], "id": 5}', None, "id is 5"),
        (b'{"inputs": [], "parameters": [1]}', None, "parameters is"),
        (b'{"inputs": [], "parameters": {"timeout": "x"}}', None, "timeout"),
        (
            b'{"inputs": [], "outputs": [{"name": "x", "parameters": {"classification": -1}}]}',
            None,
            "classification",
        ),
        (b'{"inputs": [{"name": "x", "parameters": {"shared_memory_region": "r"}}]}', None, "shared memory"),
        (orjson.dumps(build_document([1.0], shape=[2**40])), None, "elements, and 1 came"),
        (orjson.dumps(build_document([1.0], shape=[2**61, 2**61])), None, "no memory holds"),
        (orjson.dumps(build_document(["a"])), None, "'a' in its data is none"),
        (orjson.dumps(build_document([1.0], "FP16")), None, "no form in JSON"),
        (orjson.dumps({"inputs": build_document([1.0])["inputs"] * 2}), None, "twice"),
        (orjson.dumps({"inputs": build_document([1.0])["inputs"] * 1001}), None, "at most 1000"),
        (JSON_BODY, "x", "Inference-Header-Content-Length is 'x'"),
        (JSON_BODY, "-1", "Inference-Header-Content-Length"),
        (JSON_BODY, "999999", "the body has"),
        (JSON_BODY, "5", "not JSON"),
        (JSON_BODY + b"1234", str(len(JSON_BODY)), "4 bytes behind the JSON"),
        (BINARY_HEADER + b"1234567", str(len(BINARY_HEADER)), "7 bytes are left"),
        (BINARY_HEADER + b"123456789", str(len(BINARY_HEADER)), "1 bytes behind the JSON"),
        (
            BINARY_HEADER.replace(b"8", b"4") + b"1234",
            str(len(BINARY_HEADER)),
            "requires 8 bytes, and has 4",
        ),
        (BINARY_HEADER.replace(b":8", b":-8"), str(len(BINARY_HEADER) + 1), "binary_data_size is -8"),
    ],
)
def test_invalid_bodies_are_rejected(
    send_request: Any, body: bytes, length: str | None, message: str
) -> None:
    headers = {} if length is None else {"inference_header_content_length": length}
    response = send_request("POST", "/v2/models/identity/infer", body, **headers)
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert message in response.json()["error"]
    assert len(response.content) < 500


def test_sizes_and_memory_are_bounded(send_request: Any) -> None:
    response = send_request("POST", "/v2/models/identity/infer", b"x" * 5000, limit=4000)
    assert response.status_code == 413
    assert "max_request_size (4000 bytes)" in response.json()["error"]
    tracemalloc.start()
    send_request("POST", "/v2/models/identity/infer", build_document([1.0], shape=[2**31]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
_TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "y"]) | _VALUES,
        "datatype": st.sampled_from(["FP32", "INT8", "BYTES", "BOOL", "BF16"]) | _VALUES,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | _VALUES,
        "data": _VALUES,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 20) | _VALUES})
        | _VALUES,
    },
)
_REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(_TENSORS, max_size=2) | _VALUES},
    optional={"outputs": st.lists(_TENSORS, max_size=2) | _VALUES, "id": _VALUES, "parameters": _VALUES},
)


@given(_REQUESTS, st.binary(max_size=24), st.integers(-2, 2))
@settings(max_examples=300)
def test_arbitrary_documents_are_parsed_or_rejected(document: Any, raw: bytes, offset: int) -> None:
    header = json.dumps(document).encode()
    for length in (str(len(header) + offset), None):
        try:
            inference = binary_codec.parse_request("m", None, header + raw, length)
        except BadRequest as error:
            assert len(str(error)) < 600
        else:
            arrays = [
                tensors.from_content_type(part.name, part.value, part.content_type or "")
                for part in inference.inputs
            ]
            assert all(tensor.to_array().shape == tensor.shape for tensor in arrays)


def test_a_cached_header_applies_to_new_tensors() -> None:
    length = str(len(BINARY_HEADER))
    for numbers in ([1.0, 2.0], [3.0, 4.0]):
        inference = binary_codec.parse_request(
            "m", None, BINARY_HEADER + np.array(numbers, np.float32).tobytes(), length
        )
        assert np.frombuffer(inference.inputs[0].value, np.float32).tolist() == numbers
        with pytest.raises(BadRequest, match="7 bytes are left behind"):
            binary_codec.parse_request("m", None, BINARY_HEADER + b"1234567", length)


@given(st.binary(max_size=200), st.none() | st.text(max_size=6))
def test_arbitrary_bytes_raise_only_bad_request(body: bytes, length: str | None) -> None:
    with contextlib.suppress(BadRequest):
        binary_codec.parse_request("m", None, body, length)
