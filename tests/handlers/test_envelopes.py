"""Tests of envelopes around a handler; responses to single requests equal those of TorchServe 0.12 byte by
byte.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

import handlers
from handlers.context import Context
from handlers.errors import PredictionException

Predict = Callable[..., list[Any]]


@pytest.fixture
def predict(begin: Callable[..., Context]) -> Predict:
    """Return ``run(envelope, rows, handle, **headers)``, which calls a handler inside that envelope."""

    def run(name: str, rows: list[Any], handle: Callable[[list[Any]], Any], **headers: str) -> list[Any]:
        manifest = {"model": {"modelName": "m", "modelVersion": "2.0"}}
        context = begin(Context("m", "/m", manifest), len(rows), **headers)
        envelope = handlers.load_envelope(name)(lambda data, context: handle(data))
        before = set(vars(context))
        answers = envelope.handle(rows, context)
        assert set(vars(context)) == before, "an envelope removes its attributes from the context"
        return answers

    return run


def body(**value: Any) -> dict[str, Any]:
    return {"body": value}


def test_body_passes_bare_values(predict: Predict) -> None:
    rows = [{"body": 1}, {"data": "x", "body": 2}, {"body": ""}, {"data": []}]
    assert predict("body", rows, lambda data: data) == [1, "x", "", None]
    error = PredictionException("No", 404)
    assert predict("body", rows[:2], lambda data: [error, data[1]]) == [error, "x"]


def test_json_flattens_instances_and_groups_predictions(predict: Predict) -> None:
    rows = [body(instances=[1, 2]), {"data": {"instances": [[3]]}}, {"instances": ["é"]}]
    assert predict("json", rows, lambda data: [{"a": value} for value in data]) == [
        '{"predictions": [{"a": 1}, {"a": 2}]}',
        '{"predictions": [{"a": [3]}]}',
        '{"predictions": [{"a": "\\u00e9"}]}',
    ]


def test_json_leaves_numbers_that_json_does_not_have_to_the_server(predict: Predict) -> None:
    [answer] = predict("json", [body(instances=[1])], lambda data: [math.inf])
    assert answer == {"predictions": [math.inf]}


def test_json_writes_bytes_as_their_json_or_in_base64(predict: Predict) -> None:
    [answer] = predict("json", [body(instances=[1, 2])], lambda data: [b'[{"a": 1}]', b"\xff"])
    assert answer == '{"predictions": [[{"a": 1}], {"b64": "/w=="}]}'


def test_json_decodes_b64(predict: Predict) -> None:
    rows_seen: list[Any] = []
    row = body(instances=[{"b64": "aGk="}, {"x": {"b64": "eW8="}, "y": 3, "b64": "kept"}, "b64"])
    predict("json", [row], lambda data: rows_seen.extend(data) or [0] * len(data))
    assert rows_seen == [b"hi", {"x": b"yo", "y": 3, "b64": "kept"}, "b64"]


@pytest.mark.parametrize(
    "content", [b'{"instances": [1]}', bytearray(b'{"instances": [1]}'), '{"instances": [1]}']
)
def test_json_text_is_parsed(predict: Predict, content: Any) -> None:
    assert predict("json", [{"body": content}], lambda data: data) == ['{"predictions": [1]}']
    assert predict("kserve", [{"data": content}], lambda data: data) == [{"predictions": [1]}]


def test_kserve_predicts_and_explains(predict: Predict) -> None:
    row = body(instances=[1, 2, 3])
    assert predict("kserve", [row], lambda data: [x * 2 for x in data]) == [{"predictions": [2, 4, 6]}]
    assert predict("kserve", [row], lambda data: [sum(data)]) == [{"predictions": [6]}], (
        "a single request gets all values"
    )
    assert predict("kserve", [row], lambda data: [0.5], explain="True") == [{"explanations": [0.5]}]


def test_what_a_handler_sets_on_its_context_stays(begin: Callable[..., Context]) -> None:
    context = begin(Context("m", "/m", {}), 2)

    def handle(data: list[Any], rows: Context) -> list[Any]:
        rows.seen = getattr(rows, "seen", 0) + len(data)
        rows.set_response_header(2, "x-row", "of the second request")
        return data

    requests = [body(instances=[1, 2]), body(instances=[3])]
    envelope = handlers.load_envelope("kserve")(handle)
    for seen in (3, 6):
        assert envelope.handle(requests, context) == [{"predictions": [1, 2]}, {"predictions": [3]}]
        assert context.seen == seen and context.request_ids == {0: "id-0", 1: "id-1"}
    assert context.get_response_headers(1) == {"x-row": "of the second request"}
    assert context.get_response_headers(0) == {}


def test_kserve_groups_predictions_by_request(predict: Predict) -> None:
    rows = [body(instances=[1, 2]), body(instances=[]), body(instances=[3])]
    assert predict("kserve", rows, lambda data: [x * 2 for x in data]) == [
        {"predictions": [2, 4]},
        {"predictions": []},
        {"predictions": [6]},
    ]
    with pytest.raises(ValueError, match="3 rows, of 3 requests, and returned 1 values"):
        predict("kserve", rows, lambda data: [sum(data)])


def make_v2_request(
    shape: list[int], datatype: str, data: list[Any], name: str = "a", **more: Any
) -> dict[str, Any]:
    return body(inputs=[{"name": name, "shape": shape, "datatype": datatype, "data": data}], **more)


def test_kservev2_reshapes_its_tensors(predict: Predict) -> None:
    rows_seen: list[Any] = []
    [answer] = predict(
        "kservev2",
        [make_v2_request([2, 2], "INT64", [1, 2, 3, 4], id="q")],
        lambda data: rows_seen.extend(data) or [[7]],
    )
    assert rows_seen == [{"name": "a", "shape": [2, 2], "datatype": "INT64", "data": [[1, 2], [3, 4]]}]
    assert json.dumps(answer) == (
        '{"id": "q", "model_name": "m", "model_version": "2.0", '
        '"outputs": [{"name": "a", "datatype": "INT64", "data": [7], "shape": [1]}]}'
    )


@pytest.mark.parametrize(
    ("value", "datatype", "data"),
    [
        ([[1, 2], [3, 4]], "INT64", [1, 2, 3, 4]),
        (1.5, "FP64", [1.5]),
        ([True, False], "BOOL", [True, False]),
        ("hey", "BYTES", ["hey"]),
        (b"hey", "BYTES", ["hey"]),
        ([b"hey"], "BYTES", ["hey"]),
        ({"cat": 0.5}, "BYTES", [{"cat": 0.5}]),
    ],
)
def test_kservev2_formats_any_value(predict: Predict, value: Any, datatype: str, data: list[Any]) -> None:
    [answer] = predict(
        "kservev2",
        [make_v2_request([1], "BYTES", ["text"], id=" ")],
        lambda rows: [value] * (rows[0]["data"] == "text"),
    )
    assert answer["id"] == "id-0", "the server's id, if the request has none"
    assert answer["outputs"] == [{"name": "a", "datatype": datatype, "data": data, "shape": [len(data)]}]


def test_kservev2_groups_outputs_by_request(predict: Predict) -> None:
    two = body(
        inputs=[{"name": n, "shape": [1], "datatype": "FP32", "data": [i]} for i, n in enumerate("xy")]
    )
    first, second = predict(
        "kservev2",
        [two, make_v2_request([1], "INT32", [5], id="z")],
        lambda data: [row["data"] for row in data],
    )
    assert [(out["name"], out["data"]) for out in first["outputs"]] == [("x", [0]), ("y", [1])]
    assert (first["id"], second["id"]) == ("id-0", "z")
    assert second["outputs"] == [{"name": "a", "datatype": "INT64", "data": [5], "shape": [1]}]
    [more] = predict("kservev2", [make_v2_request([1], "INT32", [5])], lambda data: [1, 2])
    assert [out["name"] for out in more["outputs"]] == ["a", "output-1"]


def test_kservev2_puts_names_and_id_on_the_context(begin: Any) -> None:
    def handle(data: list[Any], context: Context) -> list[Any]:
        return [f"{context.input_names} {context.input_request_id}"]

    context = begin(Context("m", "/m", None), 1)
    [answer] = handlers.load_envelope("kservev2")(handle).handle(
        [make_v2_request([1], "INT8", [1], id="q")], context
    )
    assert answer["outputs"][0]["data"] == ["['a'] q"]


INVALID = {
    "json": [
        (body(), "no list of instances"),
        ({"body": b"{"}, "not JSON"),
        (body(instances=3), "no list of instances"),
        (body(instances=[{"b64": "a"}]), "b64 is not base64"),
        (body(instances=[{"x": {"b64": 3}}]), "b64 is not base64"),
    ],
    "kserve": [({"body": [1]}, "no list of instances"), ({"body": None}, "no list of instances")],
    "kservev2": [
        (body(inputs=[3]), r"inputs\[0\] is no object"),
        (body(inputs=[{"name": "a", "shape": [1]}]), r"inputs\[0\] lacks data, datatype"),
        (make_v2_request([3], "INT8", [1]), r"inputs\[0\] \(a\): its data does not fill its shape \[3\]"),
        (make_v2_request([1], "INT8", [[1], [1, 2]]), "does not fill its shape"),
        (make_v2_request([1], "BYTES", []), "a list with one text"),
    ],
}
VALID = {
    "json": body(instances=[1]),
    "kserve": body(instances=[1]),
    "kservev2": make_v2_request([1], "INT8", [1]),
}


@pytest.mark.parametrize(
    ("name", "invalid", "message"), [(name, *case) for name, cases in INVALID.items() for case in cases]
)
def test_a_malformed_request_fails_alone(predict: Predict, name: str, invalid: Any, message: str) -> None:
    rows_seen: list[Any] = []
    error, answer = predict(name, [invalid, VALID[name]], lambda data: rows_seen.append(len(data)) or [1])
    assert isinstance(error, PredictionException) and error.error_code == 400
    with pytest.raises(PredictionException, match=message):
        raise error
    assert "1" in str(answer) and rows_seen == [1]
    [error] = predict(name, [invalid], lambda data: rows_seen.append("not called"))
    assert error.error_code == 400 and rows_seen == [1], "the handler is not called without rows"


@pytest.mark.parametrize("name", sorted(VALID))
def test_a_rows_error_fails_its_request(predict: Predict, name: str) -> None:
    error = PredictionException("Too small", 422)
    first, second = predict(name, [VALID[name], VALID[name]], lambda data: [error, 5])
    assert first is error and "5" in str(second)


def test_a_value_that_cannot_be_formatted_fails_alone(predict: Predict) -> None:
    rows = [body(instances=[1]), body(instances=[2])]
    first, second = predict("json", rows, lambda data: [{1, 2}, 5])
    assert isinstance(first, TypeError) and second == '{"predictions": [5]}'
    first, second = predict("kservev2", [VALID["kservev2"]] * 2, lambda data: [[[1], [2, 3]], 5])
    assert isinstance(first, ValueError) and second["outputs"][0]["data"] == [5]


@pytest.mark.parametrize("name", ["body", *sorted(VALID)])
def test_a_description_is_passed_unchanged(predict: Predict, name: str) -> None:
    assert predict(name, [{}], lambda data: [{"input": "image"}], describe="True") == [{"input": "image"}]


@pytest.mark.parametrize("name", ["body", *sorted(VALID)])
def test_an_empty_batch_is_passed_unchanged(name: str) -> None:
    assert handlers.load_envelope(name)(lambda data, context: data).handle(None, None) is None


def test_batches_of_an_async_handler_overlap(archive: Any, begin: Any) -> None:
    source = """
    import asyncio

    async def handle(data, context):
        await asyncio.sleep(0)
        return [value * 2 for value in data]
    """
    entry = handlers.load("handler", archive(handler=source), {})
    envelope = handlers.load_envelope("json")(entry)

    async def both() -> list[Any]:
        one, two = (begin(Context("m", "/m", None)) for _ in range(2))
        first = envelope.handle([body(instances=[1])], one)
        second = envelope.handle([body(instances=[2, 3]), body()], two)
        return [await first, await second]

    first, (second, error) = asyncio.run(both())
    assert (
        first == ['{"predictions": [2]}'] and second == '{"predictions": [4, 6]}' and error.error_code == 400
    )


def test_json_passes_the_parameters_of_each_request_to_its_rows(begin: Callable[..., Context]) -> None:
    requests = [
        body(instances=[1, 2], parameters={"k": 3}),
        body(instances=[4]),
        body(instances=[5], parameters=None),
        body(instances=[5], parameters=6),
    ]
    context = begin(Context("m", "/m", {"model": {}}), len(requests))

    def handle(data: list[Any], context: Context) -> list[Any]:
        return [dict(context.get_parameters(index)) for index in range(len(data))]

    *answers, error = handlers.load_envelope("json")(handle).handle(requests, context)
    assert [json.loads(answer)["predictions"] for answer in answers] == [[{"k": 3}, {"k": 3}], [{}], [{}]]
    assert isinstance(error, PredictionException) and error.error_code == 400
    assert "parameters is 6" in error.message
    begin(context, 1)
    assert context.get_parameters(0) == {}


def test_vertex_answers_predictions_and_raw_predictions(predict: Predict) -> None:
    rows = [
        body(instances=[{"b64": "aGk="}, 2]),
        {"body": b"\x00raw"},
        {"data": b'{"instances": ["x"]}'},
        body(x=1),
    ]
    seen: list[Any] = []

    def handle(data: list[Any]) -> list[Any]:
        seen.extend(data)
        return [str(index) for index in range(len(data))]

    assert predict("vertex", rows, handle) == [
        '{"predictions": ["0", "1"]}',
        "2",
        '{"predictions": ["3"]}',
        "4",
    ]
    assert seen == [b"hi", 2, {"body": b"\x00raw"}, "x", body(x=1)]


def test_vertex_refuses_instances_that_are_no_list(predict: Predict) -> None:
    [answer] = predict("vertex", [body(instances=1)], lambda data: data)
    assert isinstance(answer, PredictionException) and answer.error_code == 400


def test_vertex_refuses_an_instance_that_is_not_base64(predict: Predict) -> None:
    bad, good = predict("vertex", [body(instances=[{"b64": 3}]), body(instances=[1])], lambda data: data)
    assert isinstance(bad, PredictionException) and bad.error_code == 400
    assert good == '{"predictions": [1]}'
