"""Model classes: annotations, validation, batches, streams, coroutines, and errors of their interface."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from pydantic import BaseModel, Field

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.model_class import ModelClassHandler, create_handler, model
from handlers.model_interface import read_interface


class Point(BaseModel):
    x: float
    y: float = Field(ge=0)
    tags: list[str] = []


class Norm(BaseModel):
    value: float


class Batch:
    """One batch of a handler: rows in, values, response headers and streamed pieces out."""

    def __init__(self, cls: type, *rows: Any, **headers: str) -> None:
        self.handler = create_handler(cls)
        self.context = Context("m", ".", {})
        self.sent: list[tuple[int, Any]] = []
        self.values = asyncio.run(self._run(list(rows), headers))

    async def _run(self, rows: list[Any], headers: dict[str, str]) -> Any:
        if not inspect.iscoroutinefunction(self.handler.handle):
            return await asyncio.to_thread(self._run_sync, rows, headers)
        await self.handler.initialize(self.context)
        self._begin(rows, headers)
        return await self.handler.handle(rows, self.context)

    def _run_sync(self, rows: list[Any], headers: dict[str, str]) -> Any:
        self.handler.initialize(self.context)
        self._begin(rows, headers)
        return self.handler.handle(rows, self.context)

    def _begin(self, rows: list[Any], headers: dict[str, str]) -> None:
        ids = [str(index) for index in range(len(rows))]
        self.context.begin(
            ids, [headers] * len(rows), [{}] * len(rows), lambda i, v: self.sent.append((i, v))
        )


def body(value: Any) -> dict[str, Any]:
    return {"body": value}


class Distance:
    def setup(self, context: Context) -> None:
        self.device = context.device

    def predict(self, request: Point) -> Norm:
        return Norm(value=(request.x**2 + request.y**2) ** 0.5)


def test_a_pydantic_model_is_parsed_validated_and_written() -> None:
    batch = Batch(
        Distance, body({"x": 3, "y": 4}), body(bytearray(b'{"x": 6, "y": 8}')), {"x": "1", "y": "0"}
    )
    assert batch.values == [{"value": 5.0}, {"value": 10.0}, {"value": 1.0}]
    assert batch.context.get_response_content_type(0) == "application/json"
    assert batch.handler.input_type == "application/json"


def test_an_invalid_request_fails_alone_with_its_place() -> None:
    good, bad, broken = Batch(Distance, body({"x": 3, "y": 4}), body({"x": 1, "y": -1}), body(b"{")).values
    assert good == {"value": 5.0}
    assert isinstance(bad, PredictionException)
    assert bad.error_code == 400
    assert bad.message == "request is invalid: y: Input should be greater than or equal to 0"
    assert "Invalid JSON" in broken.message


def test_a_result_must_match_its_annotation() -> None:
    class Wrong:
        def predict(self, request: dict) -> Norm:
            return {"valu": 1}  # type: ignore[return-value]

    (error,) = Batch(Wrong, body({})).values
    assert isinstance(error, ValueError)
    assert "does not match its annotation: value: Field required" in str(error)


def test_the_signature_and_the_schemas_come_from_the_annotations() -> None:
    interface = read_interface(Distance)
    assert interface.signature == {
        "inputs": [
            {"name": "x", "datatype": "FP64", "shape": [1]},
            {"name": "y", "datatype": "FP64", "shape": [1]},
            {"name": "tags", "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [{"name": "value", "datatype": "FP64", "shape": [1]}],
    }
    schema = interface.schemas["input"]["schema"]
    assert schema["properties"]["y"]["minimum"] == 0
    assert schema["required"] == ["x", "y"]


def test_tensors_become_fields_and_fields_become_tensors() -> None:
    row = {"x": np.array([3.0]), "y": np.array([4.0]), "tags": np.array([b"a"], object)}
    (value,) = Batch(Distance, row).values
    assert value["value"].tolist() == [5.0]
    assert value["value"].dtype == np.float64


@dataclass
class Pair:
    left: int
    right: int


def test_dataclasses_lists_texts_and_bytes() -> None:
    class Add:
        def predict(self, request: Pair) -> int:
            return request.left + request.right

    class Total:
        def predict(self, request: list[float]) -> float:
            return sum(request)

    class Upper:
        def predict(self, text: str) -> str:
            return text.upper()

    class Size:
        def predict(self, request: bytes) -> dict:
            return {"bytes": len(request)}

    assert Batch(Add, body({"left": 1, "right": 2})).values == [3]
    assert Batch(Total, body([1, 2.5])).values == [3.5]
    texts = Batch(Upper, body("ä"), body(bytearray("ö".encode())), body({"a": 1}), body(bytearray(b"\xff")))
    assert texts.values[:2] == ["Ä", "Ö"]
    assert "a JSON object was sent" in texts.values[2].message
    assert "not UTF-8" in texts.values[3].message
    assert Batch(Upper, {"text": np.array([b"ab"], object)}).values == ["AB"]
    assert texts.handler.input_type == "text/plain"
    assert Batch(Size, body(bytearray(b"abc"))).values == [{"bytes": 3}]


def test_arrays_have_their_dtype() -> None:
    class Double:
        def predict(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            assert values.dtype == np.float32
            return values * 2

    batch = Batch(Double, body([[1, 2]]), body(["a"]), body([[1], [1, 2]]))
    assert batch.values[0].tolist() == [[2.0, 4.0]]
    assert all("not a JSON list of numbers" in error.message for error in batch.values[1:])
    assert batch.handler.signature == {
        "inputs": [{"name": "values", "datatype": "FP32"}],
        "outputs": [{"name": "output", "datatype": "FP32"}],
    }
    assert Batch(Double, {"values": np.ones((1, 2), np.float32)}).values[0].tolist() == [[2.0, 2.0]]


def test_tensors_of_torch() -> None:
    class Double:
        def predict(self, values: torch.Tensor) -> torch.Tensor:
            return values * 2

    assert Batch(Double, body([1.5])).values[0].tolist() == [3.0]


def test_images_are_decoded_and_written_as_png() -> None:
    class Mirror:
        def predict(self, image: Image.Image) -> Image.Image:
            return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)

    image = Image.new("RGB", (2, 1), "red")
    image.putpixel((1, 0), (0, 0, 255))
    buffer = BytesIO()
    image.save(buffer, "PNG")
    batch = Batch(Mirror, body(bytearray(buffer.getvalue())), body(bytearray(b"no image")))
    assert Image.open(BytesIO(batch.values[0])).getpixel((0, 0)) == (0, 0, 255)
    assert batch.context.get_response_content_type(0) == "image/png"
    assert batch.handler.input_type == "image/*"
    assert "not an image" in batch.values[1].message


def test_a_method_without_annotations_gets_the_parsed_value() -> None:
    class Same:
        def predict(self, request):  # type: ignore[no-untyped-def]
            return request

    assert Batch(Same, body({"a": 1}), body(bytearray(b"x")), {"a": "1", "b": "2"}).values == [
        {"a": 1},
        b"x",
        {"a": "1", "b": "2"},
    ]


def test_predict_batch_gets_the_valid_requests() -> None:
    class Lengths:
        def predict_batch(self, requests: list[str]) -> list[int]:
            assert requests == ["a", "bbb"]
            return [len(text) for text in requests]

    values = Batch(Lengths, body("a"), body([1]), body("bbb")).values
    assert (values[0], values[2]) == (1, 3)
    assert isinstance(values[1], PredictionException)


def test_predict_batch_must_return_a_result_for_each_request() -> None:
    class Short:
        def predict_batch(self, requests: list[str]) -> list[str]:
            return requests[1:]

    class NoList:
        def predict_batch(self, requests):  # type: ignore[no-untyped-def]
            return "ab"

    with pytest.raises(TypeError, match=r"test_model_class\.py, line \d+: predict_batch got 2 requests and"):
        Batch(Short, body("a"), body("b"))
    with pytest.raises(TypeError, match="returned str, and must return a list of 2"):
        Batch(NoList, body("a"), body("b"))


def test_async_predict_overlaps_and_async_predict_batch_keeps_its_batch() -> None:
    started: list[str] = []

    class Waits:
        async def setup(self, context: Context) -> None:
            self.both = asyncio.Event()

        async def predict(self, request: str) -> str:
            started.append(request)
            if len(started) == 2:
                self.both.set()
            await asyncio.wait_for(self.both.wait(), 60)
            return request * 2

    class Together:
        async def predict_batch(self, requests: list[str]) -> list[int]:
            await asyncio.sleep(0)
            return [len(requests)] * len(requests)

    assert Batch(Waits, body("a"), body("b")).values == ["aa", "bb"]
    together = Batch(Together, body("a"), body("b"))
    assert together.values == [2, 2]
    assert not inspect.iscoroutinefunction(together.handler.handle)


def test_generators_stream_in_turns() -> None:
    class Words:
        def predict(self, text: str) -> Iterator[str]:
            for word in text.split():
                if word == "!":
                    raise RuntimeError("failed")
                yield word

    class Counts:
        async def predict(self, request: int) -> AsyncIterator[dict]:
            for number in range(request):
                yield {"number": number}

    class Letters:
        def predict_batch(self, requests: list[str]) -> Iterator[list[str]]:
            yield from ([text[place] for text in requests] for place in range(2))

    words = Batch(Words, body("a b"), body("c !"))
    assert words.sent == [(0, "a"), (1, "c"), (0, "b")]
    assert words.values[0] == ""
    assert str(words.values[1]) == "failed"
    counts = Batch(Counts, body(2))
    assert [json.loads(line) for _, line in counts.sent] == [{"number": 0}, {"number": 1}]
    assert Batch(Letters, body("ab"), body("cd")).sent == [(0, "a"), (1, "c"), (0, "b"), (1, "d")]
    assert Batch(Words, {"text": np.array([b"a b"], object)}).values == ["ab"]


def test_an_explanation_is_refused_and_a_description_has_the_schemas() -> None:
    (error,) = Batch(Distance, body({"x": 1, "y": 1}), explain="True").values
    assert error.error_code == 501
    (description,) = Batch(Distance, body({}), describe="True").values
    assert description["output"]["schema"]["properties"]["value"]["type"] == "number"


def test_options_do_not_change_the_class() -> None:
    @model(batch_size=8, replicas=2)
    class Decorated(Distance):
        pass

    @model
    class Bare(Distance):
        pass

    assert Batch(Decorated, body({"x": 3, "y": 4})).values == [{"value": 5.0}]
    assert Bare.__torchrelay_options__ == {}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Model:\n    pass", r"model\.py, line 1: the class Model has no method predict"),
        ("class Model:\n    def predict(self): pass", r"line 2: Model\.predict takes 0 values besides self"),
        ("class Model:\n    def predict(self, a, b): pass", r"line 2: Model\.predict takes 2 values"),
        (
            "class Model:\n    def predict_batch(self, requests: str): pass",
            r"line 2: .*requests of predict_batch is annotated str, and is a list.* Annotate list\[str\]",
        ),
        (
            "class Model:\n    def predict_batch(self, requests) -> str: pass",
            r"line 2: .*the result of predict_batch is annotated str",
        ),
        (
            "class Model:\n    def predict(self, request) -> str:\n        yield 'a'",
            r"line 2: Model\.predict yields its result .* Annotate it -> Iterator\[str\]",
        ),
        (
            "class Model:\n    def predict(self, request: 'Missing'): pass",
            r"line 2: Model\.predict: its annotations cannot be read: name 'Missing' is not defined",
        ),
        (
            "class Other: pass\nclass Model:\n    def predict(self, request: Other): pass",
            r"line 3: Model\.predict: request is annotated Other, which is not supported",
        ),
        (
            "class Model:\n    def predict(self, request: str): pass\n"
            "    def predict_batch(self, requests: list[int]): pass",
            r"line 2: predict and predict_batch of Model have different types",
        ),
        (
            "class A:\n    def predict(self, r): pass\nclass B:\n    def predict(self, r): pass",
            r"2 classes in it have predict or predict_batch \(A, B\)",
        ),
        ("x = 1\nimport missing_package", r"model\.py, line 2: importing it failed with ModuleNotFoundError"),
        ("x = 1\ndef f(:\n", r"model\.py, line 2: importing it failed with SyntaxError"),
        ("def f():\n    1 / 0\nf()", r"model\.py, line 2: importing it failed with ZeroDivisionError"),
    ],
)
def test_an_invalid_file_is_refused_with_file_line_and_remedy(
    tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "model.py").write_text(source)
    name = "model.py:Model" if "class Model:\n    pass" in source else "model.py"
    with pytest.raises(HandlerLoadError, match=message):
        handlers.load(name, tmp_path, {})


def test_the_loader_selects_the_class(tmp_path: Path) -> None:
    (tmp_path / "classes.py").write_text(
        "class Model:\n    def predict(self, r): return 'Model'\n"
        "class Other:\n    def predict(self, r): return 'Other'\n"
        "class Helper:\n    pass\n"
    )
    for name, expected in (("classes.py", "Model"), ("classes.py:Other", "Other")):
        entry = handlers.load(name, tmp_path, {})
        assert isinstance(entry.instance, ModelClassHandler)
        context = Context("m", str(tmp_path), {})
        entry.initialize(context)
        context.begin(["1"], [{}], [{}])
        assert entry([body("x")], context) == [expected]
