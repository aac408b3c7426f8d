"""Envelopes around a handler; single requests answer to the byte as TorchServe 0.12 does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

import handlers
from handlers.context import Context
from handlers.errors import PredictionException

Ask = Callable[..., list[Any]]


@pytest.fixture
def ask(begin: Callable[..., Context]) -> Ask:
    """``ask(envelope, rows, handle, **headers)``: the answers of a handler of instances inside that envelope."""

    def through(name: str, rows: list[Any], handle: Callable[[list[Any]], Any], **headers: str) -> list[Any]:
        manifest = {"model": {"modelName": "m", "modelVersion": "2.0"}}
        context = begin(Context("m", "/m", manifest), len(rows), **headers)
        envelope = handlers.load_envelope(name)(lambda data, context: handle(data))
        before = set(vars(context))
        answers = envelope.handle(rows, context)
        assert set(vars(context)) == before, "what an envelope leaves on the context is of its own batch"
        return answers

    return through


def body(**value: Any) -> dict[str, Any]:
    return {"body": value}


def test_body(ask: Ask) -> None:
    rows = [{"body": 1}, {"data": "x", "body": 2}, {"body": ""}, {"data": []}]
    assert ask("body", rows, lambda data: data) == [1, "x", "", None]
    error = PredictionException("No", 404)
    assert ask("body", rows[:2], lambda data: [error, data[1]]) == [error, "x"]


def test_json_flattens_and_groups_again(ask: Ask) -> None:
    rows = [body(instances=[1, 2]), {"data": {"instances": [[3]]}}, {"instances": ["é"]}]
    assert ask("json", rows, lambda data: [{"a": value} for value in data]) == [
        '{"predictions": [{"a": 1}, {"a": 2}]}',
        '{"predictions": [{"a": [3]}]}',
        '{"predictions": [{"a": "\\u00e9"}]}',
    ]


def test_json_decodes_b64(ask: Ask) -> None:
    seen: list[Any] = []
    row = body(instances=[{"b64": "aGk="}, {"x": {"b64": "eW8="}, "y": 3, "b64": "kept"}, "b64"])
    ask("json", [row], lambda data: seen.extend(data) or [0] * len(data))
    assert seen == [b"hi", {"x": b"yo", "y": 3, "b64": "kept"}, "b64"]


@pytest.mark.parametrize("content", [b'{"instances": [1]}', bytearray(b'{"instances": [1]}'), '{"instances": [1]}'])
def test_json_as_text(ask: Ask, content: Any) -> None:
    assert ask("json", [{"body": content}], lambda data: data) == ['{"predictions": [1]}']
    assert ask("kserve", [{"data": content}], lambda data: data) == [{"predictions": [1]}]


def test_kserve_predicts_and_explains(ask: Ask) -> None:
    row = body(instances=[1, 2, 3])
    assert ask("kserve", [row], lambda data: [x * 2 for x in data]) == [{"predictions": [2, 4, 6]}]
    assert ask("kserve", [row], lambda data: [sum(data)]) == [{"predictions": [6]}], "alone, it gets all there is"
    assert ask("kserve", [row], lambda data: [0.5], explain="True") == [{"explanations": [0.5]}]


def test_kserve_gives_every_request_its_own(ask: Ask) -> None:
    rows = [body(instances=[1, 2]), body(instances=[]), body(instances=[3])]
    assert ask("kserve", rows, lambda data: [x * 2 for x in data]) == [
        {"predictions": [2, 4]},
        {"predictions": []},
        {"predictions": [6]},
    ]
    with pytest.raises(ValueError, match="3 rows, of 3 requests, and returned 1 values"):
        ask("kserve", rows, lambda data: [sum(data)])


def v2(shape: list[int], datatype: str, data: list[Any], name: str = "a", **more: Any) -> dict[str, Any]:
    return body(inputs=[{"name": name, "shape": shape, "datatype": datatype, "data": data}], **more)


def test_kservev2_opens_its_tensors(ask: Ask) -> None:
    seen: list[Any] = []
    [answer] = ask("kservev2", [v2([2, 2], "INT64", [1, 2, 3, 4], id="q")], lambda data: seen.extend(data) or [[7]])
    assert seen == [{"name": "a", "shape": [2, 2], "datatype": "INT64", "data": [[1, 2], [3, 4]]}]
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
def test_kservev2_writes_any_value(ask: Ask, value: Any, datatype: str, data: list[Any]) -> None:
    [answer] = ask("kservev2", [v2([1], "BYTES", ["text"], id=" ")], lambda rows: [value] * (rows[0]["data"] == "text"))
    assert answer["id"] == "id-0", "the request's own, where it brings none"
    assert answer["outputs"] == [{"name": "a", "datatype": datatype, "data": data, "shape": [len(data)]}]


def test_kservev2_gives_every_request_its_own(ask: Ask) -> None:
    two = body(inputs=[{"name": n, "shape": [1], "datatype": "FP32", "data": [i]} for i, n in enumerate("xy")])
    first, second = ask("kservev2", [two, v2([1], "INT32", [5], id="z")], lambda data: [row["data"] for row in data])
    assert [(out["name"], out["data"]) for out in first["outputs"]] == [("x", [0]), ("y", [1])]
    assert (first["id"], second["id"]) == ("id-0", "z")
    assert second["outputs"] == [{"name": "a", "datatype": "INT64", "data": [5], "shape": [1]}]
    [more] = ask("kservev2", [v2([1], "INT32", [5])], lambda data: [1, 2])
    assert [out["name"] for out in more["outputs"]] == ["a", "output-1"]


def test_kservev2_tells_the_handler_the_names_and_the_id(begin: Any) -> None:
    def handle(data: list[Any], context: Context) -> list[Any]:
        return [f"{context.input_names} {context.input_request_id}"]

    context = begin(Context("m", "/m", None), 1)
    [answer] = handlers.load_envelope("kservev2")(handle).handle([v2([1], "INT8", [1], id="q")], context)
    assert answer["outputs"][0]["data"] == ["['a'] q"]


BAD = {
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
        (v2([3], "INT8", [1]), r"inputs\[0\] \(a\): its data does not fill its shape \[3\]"),
        (v2([1], "INT8", [[1], [1, 2]]), "does not fill its shape"),
        (v2([1], "BYTES", []), "a list with one text"),
    ],
}
GOOD = {"json": body(instances=[1]), "kserve": body(instances=[1]), "kservev2": v2([1], "INT8", [1])}


@pytest.mark.parametrize(("name", "bad", "complaint"), [(name, *case) for name, cases in BAD.items() for case in cases])
def test_a_request_that_cannot_be_read_fails_alone(ask: Ask, name: str, bad: Any, complaint: str) -> None:
    seen: list[Any] = []
    error, answer = ask(name, [bad, GOOD[name]], lambda data: seen.append(len(data)) or [1])
    assert isinstance(error, PredictionException) and error.error_code == 400
    with pytest.raises(PredictionException, match=complaint):
        raise error
    assert "1" in str(answer) and seen == [1]
    [error] = ask(name, [bad], lambda data: seen.append("not asked"))
    assert error.error_code == 400 and seen == [1], "with nothing to answer, the handler is not asked"


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_rows_error_is_its_requests_answer(ask: Ask, name: str) -> None:
    wrong = PredictionException("Too small", 422)
    first, second = ask(name, [GOOD[name], GOOD[name]], lambda data: [wrong, 5])
    assert first is wrong and "5" in str(second)


def test_a_value_that_the_format_cannot_hold_fails_alone(ask: Ask) -> None:
    rows = [body(instances=[1]), body(instances=[2])]
    first, second = ask("json", rows, lambda data: [{1, 2}, 5])
    assert isinstance(first, TypeError) and second == '{"predictions": [5]}'
    first, second = ask("kservev2", [GOOD["kservev2"]] * 2, lambda data: [[[1], [2, 3]], 5])
    assert isinstance(first, ValueError) and second["outputs"][0]["data"] == [5]


@pytest.mark.parametrize("name", ["body", *sorted(GOOD)])
def test_a_description_passes_untouched(ask: Ask, name: str) -> None:
    assert ask(name, [{}], lambda data: [{"input": "image"}], describe="True") == [{"input": "image"}]


@pytest.mark.parametrize("name", ["body", *sorted(GOOD)])
def test_an_empty_batch_passes_untouched(name: str) -> None:
    assert handlers.load_envelope(name)(lambda data, context: data).handle(None, None) is None


def test_around_an_async_handler_batches_overlap(archive: Any, begin: Any) -> None:
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
    assert first == ['{"predictions": [2]}'] and second == '{"predictions": [4, 6]}' and error.error_code == 400
