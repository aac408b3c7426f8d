"""Inferences into calls, replies into outputs: what the protocol's words come to, on no wire."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import tensors
from serve_app.doors.oip import convert
from serve_app.doors.oip.convert import Inference, Wanted
from serve_app.errors import HandlerSaid, InvalidBody, InvalidInput
from serve_app.settings import RuntimeSettings
from serve_app.types import Call, Input, Reply

_X = tensors.of("x", np.arange(6, dtype=np.float32).reshape(2, 3))
_ASKED = Inference("m", None, (Input(*_X.sent()),))


def _call(asked: Inference, **named: object) -> Call:
    return convert.call(asked, "id", {"a": "b"}, RuntimeSettings(), **named)


def _reply(*given: tensors.Tensor) -> Reply:
    return Reply(tensors.pack(given), tensors.PACKED)


def test_a_call_carries_its_tensors() -> None:
    call = _call(_ASKED._replace(version="2.0"))
    assert (call.model, call.version, call.request_id, call.kind) == ("m", "2.0", "id", "tensors")
    [part] = call.inputs
    assert tensors.received(part.name, part.value, part.content_type) == _X
    assert call.headers == {"a": "b", "explain": "False"}


def test_parameters_become_deadline_priority_and_sequence() -> None:
    said = {"timeout": 2_000_000, "priority": 1, "sequence_id": 7, "sequence_start": True, "sequence_end": False}
    now = time.time()
    call = _call(_ASKED._replace(parameters=said), deadline=now + 60)
    assert now < call.deadline < now + 3
    assert call.priority == "high"
    assert call.headers["ts_request_sequence_id"] == "7"
    assert call.headers["ts_request_sequence_start"] == "true"
    assert "ts_request_sequence_end" not in call.headers
    assert _call(_ASKED._replace(parameters={"timeout": "9000000000"}), deadline=now + 60).deadline == now + 60
    assert _call(_ASKED._replace(parameters={"sequence_id": 0}), priority="low").priority == "low"


@pytest.mark.parametrize("said", [{"timeout": -1}, {"timeout": "soon"}, {"priority": 1.5}, {"priority": True}])
def test_parameters_that_are_none(said: dict) -> None:
    with pytest.raises(InvalidBody, match=next(iter(said))):
        _call(_ASKED._replace(parameters=said))


def test_two_inputs_of_one_name() -> None:
    with pytest.raises(InvalidBody, match="'x' is there twice"):
        _call(_ASKED._replace(inputs=_ASKED.inputs * 2))


@given(st.permutations(["a", "b", "c"]), st.integers(0, 3))
def test_outputs_come_as_they_were_asked_for(order: list[str], count: int) -> None:
    reply = _reply(*(tensors.text(name.encode(), name) for name in "abc"))
    asked = _ASKED._replace(outputs=tuple(map(Wanted, order[:count])))
    assert [t.name for t in convert.outputs(asked, reply)] == (order[:count] or ["a", "b", "c"])


def test_an_output_that_is_not_there() -> None:
    with pytest.raises(InvalidInput, match="no output 'z'; the model gives a"):
        convert.outputs(_ASKED._replace(outputs=(Wanted("z"),)), _reply(tensors.text(b"", "a")))


def test_a_body_that_is_no_tensors_is_one_of_bytes() -> None:
    [tensor] = convert.outputs(_ASKED, Reply(b"words", "text/plain"))
    assert (tensor.name, tensor.shape, tensor.values()) == ("output-0", (1,), [b"words"])


def test_a_status_of_the_handlers_own_is_its_error() -> None:
    with pytest.raises(HandlerSaid, match="too small") as said:
        convert.outputs(_ASKED, Reply(b"too small", None, 418))
    assert said.value.code == 418


def test_classes() -> None:
    scores = tensors.of("y", np.array([[0.1, 0.7, 0.2], [3, 1, 2]], np.float32))
    [best] = convert.outputs(_ASKED._replace(outputs=(Wanted("y", classes=2),)), _reply(scores))
    assert best.shape == (2, 2)
    assert best.values() == [b"0.700000:1", b"0.200000:2", b"3.000000:0", b"2.000000:2"]
    [all_of_them] = convert.outputs(_ASKED._replace(outputs=(Wanted("y", classes=9),)), _reply(scores))
    assert all_of_them.shape == (2, 3)
    with pytest.raises(InvalidInput, match="holds no classes"):
        convert.outputs(_ASKED._replace(outputs=(Wanted("y", classes=1),)), _reply(tensors.text(b"", "y")))


def test_outputs_as_requests_name_them() -> None:
    assert convert.wanted("y", {}) == Wanted("y")
    assert convert.wanted("y", {"classification": 3, "binary_data": False}) == Wanted("y", 3, False)
    for said in ({"classification": 0}, {"classification": True}, {"binary_data": 1}):
        with pytest.raises(InvalidBody, match=next(iter(said))):
            convert.wanted("y", said)
