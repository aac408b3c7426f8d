"""Conversion of inferences to requests, and of responses to outputs."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.domain import tensors
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.errors import HandlerRejected, InvalidBody, InvalidInput
from serve_app.protocols.openinference import conversion
from serve_app.protocols.openinference.conversion import ParsedInference, RequestedOutput
from serve_app.settings import RuntimeSettings

_X = tensors.from_array("x", np.arange(6, dtype=np.float32).reshape(2, 3))
_INFERENCE = ParsedInference("m", None, (InputPart(*_X.to_part()),))


def _build_request(inference: ParsedInference, **options: object) -> InferenceRequest:
    return conversion.build_request(inference, "id", {"a": "b"}, RuntimeSettings(), **options)


def _response(*outputs: tensors.Tensor) -> InferenceResponse:
    return InferenceResponse(tensors.pack(outputs), tensors.PACKED_MEDIA_TYPE)


def test_requests_have_the_tensors_as_inputs() -> None:
    request = _build_request(_INFERENCE._replace(version="2.0"))
    assert (request.model, request.version, request.request_id, request.kind) == ("m", "2.0", "id", "tensors")
    [part] = request.inputs
    assert tensors.from_content_type(part.name, part.value, part.content_type) == _X
    assert request.headers == {"a": "b", "explain": "False"}


def test_parameters_become_deadline_priority_and_sequence() -> None:
    parameters = {
        "timeout": 2_000_000,
        "priority": 1,
        "sequence_id": 7,
        "sequence_start": True,
        "sequence_end": False,
    }
    now = time.time()
    request = _build_request(_INFERENCE._replace(parameters=parameters), deadline=now + 60)
    assert now + 2 <= request.deadline <= time.time() + 2
    assert request.priority == "high"
    assert request.headers["ts_request_sequence_id"] == "7"
    assert request.headers["ts_request_sequence_start"] == "true"
    assert "ts_request_sequence_end" not in request.headers
    assert (
        _build_request(_INFERENCE._replace(parameters={"timeout": "9000000000"}), deadline=now + 60).deadline
        == now + 60
    )
    assert (
        _build_request(_INFERENCE._replace(parameters={"sequence_id": 0}), priority="low").priority == "low"
    )


@pytest.mark.parametrize(
    "parameters", [{"timeout": -1}, {"timeout": "x"}, {"priority": 1.5}, {"priority": True}]
)
def test_invalid_parameters_are_rejected(parameters: dict) -> None:
    with pytest.raises(InvalidBody, match=next(iter(parameters))):
        _build_request(_INFERENCE._replace(parameters=parameters))


def test_duplicate_inputs_are_rejected() -> None:
    with pytest.raises(InvalidBody, match="'x' is there twice"):
        _build_request(_INFERENCE._replace(inputs=_INFERENCE.inputs * 2))


@given(st.permutations(["a", "b", "c"]), st.integers(0, 3))
def test_outputs_have_the_requested_order(order: list[str], count: int) -> None:
    response = _response(*(tensors.from_text(name.encode(), name) for name in "abc"))
    inference = _INFERENCE._replace(outputs=tuple(map(RequestedOutput, order[:count])))
    assert [t.name for t in conversion.select_outputs(inference, response)] == (
        order[:count] or ["a", "b", "c"]
    )


def test_unknown_outputs_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="no output 'z'; the model gives a"):
        conversion.select_outputs(
            _INFERENCE._replace(outputs=(RequestedOutput("z"),)), _response(tensors.from_text(b"", "a"))
        )


def test_other_bodies_become_one_bytes_tensor() -> None:
    [tensor] = conversion.select_outputs(_INFERENCE, InferenceResponse(b"words", "text/plain"))
    assert (tensor.name, tensor.shape, tensor.to_list()) == ("output-0", (1,), [b"words"])


def test_an_error_status_of_the_handler_is_raised() -> None:
    with pytest.raises(HandlerRejected, match="too small") as raised:
        conversion.select_outputs(_INFERENCE, InferenceResponse(b"too small", None, 418))
    assert raised.value.code == 418


def test_classification_returns_the_highest_values() -> None:
    scores = tensors.from_array("y", np.array([[0.1, 0.7, 0.2], [3, 1, 2]], np.float32))
    [best] = conversion.select_outputs(
        _INFERENCE._replace(outputs=(RequestedOutput("y", classes=2),)), _response(scores)
    )
    assert best.shape == (2, 2)
    assert best.to_list() == [b"0.700000:1", b"0.200000:2", b"3.000000:0", b"2.000000:2"]
    [all_classes] = conversion.select_outputs(
        _INFERENCE._replace(outputs=(RequestedOutput("y", classes=9),)), _response(scores)
    )
    assert all_classes.shape == (2, 3)
    with pytest.raises(InvalidInput, match="holds no classes"):
        conversion.select_outputs(
            _INFERENCE._replace(outputs=(RequestedOutput("y", classes=1),)),
            _response(tensors.from_text(b"", "y")),
        )


def test_requested_outputs_are_parsed() -> None:
    assert conversion.parse_output("y", {}) == RequestedOutput("y")
    assert conversion.parse_output("y", {"classification": 3, "binary_data": False}) == RequestedOutput(
        "y", 3, False
    )
    for parameters in ({"classification": 0}, {"classification": True}, {"binary_data": 1}):
        with pytest.raises(InvalidBody, match=next(iter(parameters))):
            conversion.parse_output("y", parameters)
