from __future__ import annotations

from typing import Any

import pytest

from handlers.context import Context
from handlers.errors import PredictionException
from handlers.torchserve_compat.intermediate import send_intermediate_predict_response

MESSAGE = "Intermediate Prediction success"


@pytest.fixture
def sent() -> list[tuple[int, Any]]:
    return []


@pytest.fixture
def context(sent: list[tuple[int, Any]]) -> Context:
    context = Context("chat", "/models/chat", {})
    context.begin(["a", "b", "c"], [{}] * 3, [{}] * 3, lambda idx, value: sent.append((idx, value)))
    return context


def test_each_row_is_sent_its_value(context: Context, sent: list[Any]) -> None:
    send_intermediate_predict_response(["x", b"y", {"z": 1}], context.request_ids, MESSAGE, 200, context)
    assert sent == [(0, "x"), (1, b"y"), (2, {"z": 1})]
    assert context.get_response_headers(1) == {"ts_stream_next": "true"}


def test_rows_of_a_micro_batch_are_found_by_id(context: Context, sent: list[Any]) -> None:
    send_intermediate_predict_response(["x", "y"], {0: "b", 1: "c"}, MESSAGE, 200, context)
    assert sent == [(1, "x"), (2, "y")]


def test_values_of_an_earlier_batch_are_dropped(
    context: Context, sent: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    earlier = context.request_ids
    context.begin(["d"], [{}], [{}], lambda idx, value: sent.append((idx, value)))
    send_intermediate_predict_response(["x", "y", "z"], earlier, MESSAGE, 200, context)
    assert sent == []
    assert "Request a is not in the batch" in caplog.text


def test_other_codes_than_200_are_sent_as_errors(context: Context, sent: list[Any]) -> None:
    send_intermediate_predict_response(None, {1: "b"}, "Too long", 413, context)
    [(idx, error)] = sent
    assert idx == 1 and isinstance(error, PredictionException)
    assert (error.message, error.error_code) == ("Too long", 413)


def test_too_few_values_are_rejected(context: Context, sent: list[Any]) -> None:
    with pytest.raises(ValueError, match="ret holds 1 values, req_id_map 3 requests"):
        send_intermediate_predict_response(["x"], context.request_ids, MESSAGE, 200, context)
    assert sent == []


def test_only_the_first_rank_sends(
    context: Context, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    send_intermediate_predict_response(["x"] * 3, context.request_ids, MESSAGE, 200, context)
    assert sent == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    send_intermediate_predict_response(["x"] * 3, context.request_ids, MESSAGE, 200, context)
    assert len(sent) == 3
