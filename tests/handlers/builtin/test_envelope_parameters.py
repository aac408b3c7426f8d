"""Built-in text handlers behind the envelope ``vertex``: a request's parameters apply to its instances."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.context import Context
from handlers.errors import PredictionException

pytestmark = pytest.mark.integration

Ask = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.hf_folders import save_byte_llama

    return save_byte_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["llm", "causal_lm"])
def ask(request: pytest.FixtureRequest, folder: Path) -> Iterator[Ask]:
    """Return ``ask(*bodies)``: send one batch to the handler behind the envelope, and return its responses.

    The chunks of its streams are in ``ask.chunks``, by the index of the request.
    """
    loop = asyncio.new_event_loop()

    def wait(result: Any) -> Any:
        return loop.run_until_complete(result) if inspect.isawaitable(result) else result

    entry = handlers.load(request.param, folder, {})
    context = Context("m", str(folder), {})
    wait(entry.initialize(context))
    envelope = handlers.load_envelope("vertex")(entry)

    def ask(*bodies: Any) -> list[Any]:
        count = len(bodies)
        chunks: dict[int, list[Any]] = {}
        ask.chunks = chunks  # type: ignore[attr-defined]
        ids = [f"{index}" for index in range(count)]
        context.begin(ids, [{}] * count, [{}] * count, lambda i, text: chunks.setdefault(i, []).append(text))
        return wait(envelope.handle([{"body": body} for body in bodies], context))

    yield ask
    if request.param == "llm":
        wait(entry.instance.engine.shutdown())
    loop.close()


def texts(answer: str) -> list[str]:
    return [prediction["text"] for prediction in json.loads(answer)["predictions"]]


def test_parameters_apply_to_each_instance_of_their_request(ask: Ask) -> None:
    [long] = texts(ask({"instances": ["Once"], "parameters": {"max_new_tokens": 12}})[0])
    own = {"prompt": "Once", "parameters": {"max_new_tokens": 3}}
    first, second, third = ask(
        {"instances": ["Once", {"b64": "T25jZQ=="}, own], "parameters": {"max_new_tokens": 12}},
        {"instances": []},
        {"instances": [{"prompt": "Once", "max_new_tokens": 3}], "parameters": {"max_new_tokens": 12}},
    )
    whole, of_bytes, short = texts(first)
    assert whole == of_bytes == long and long.startswith(short) and len(short) < len(long)
    assert texts(second) == [] and texts(third) == [short], "an instance's own parameter takes precedence"


def test_a_raw_prediction_may_stream_beside_instances(ask: Ask) -> None:
    parameters = {"max_new_tokens": 6}
    raw = {"inputs": "Once", "parameters": {**parameters, "stream": True}}
    answers = ask({"instances": ["Once", "a"], "parameters": parameters}, raw)
    assert list(ask.chunks) == [1]  # type: ignore[attr-defined]
    streamed = "".join(ask.chunks[1]) + answers[1]  # type: ignore[attr-defined]
    assert texts(answers[0])[0] == streamed


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"instances": ["Once"], "parameters": [1]}, r"parameters is \[1\]: it is an object"),
        ({"instances": ["Once"], "parameters": {"temperature": -1}}, "temperature is -1"),
        ({"instances": ["Once"], "parameters": {"stream": True}}, "without instances"),
        ({"instances": [{"prompt": "Once", "parameters": 3}]}, "parameters is an object"),
        ({"instances": [3]}, "prompt is a text"),
    ],
)
def test_an_invalid_request_fails_alone(ask: Ask, body: Any, message: str) -> None:
    error, answer = ask(body, {"instances": ["Once"], "parameters": {"max_new_tokens": 2}})
    assert isinstance(error, PredictionException) and error.error_code == 400
    with pytest.raises(PredictionException, match=message):
        raise error
    assert len(texts(answer)) == 1


def test_a_hugging_face_folder_takes_parameters(tmp_path: Path, begin: Callable[..., Context]) -> None:
    from tests.support.hf_folders import SHORT, save_bert

    folder = save_bert("BertForSequenceClassification", tmp_path, num_labels=3)
    entry = handlers.load("huggingface", folder, {})
    entry.initialize(
        context := Context("m", str(folder), {}, model_yaml_config={"task": "text-classification"})
    )
    envelope = handlers.load_envelope("vertex")(entry)
    bodies = [
        {"instances": [SHORT, {"text": SHORT}], "parameters": {"top_k": 2}},
        {"instances": [SHORT]},
        {"instances": [SHORT], "parameters": {"top": 2}},
    ]
    two, one, error = envelope.handle([{"body": body} for body in bodies], begin(context, 3))
    first, second = json.loads(two)["predictions"]
    assert first == second and len(first) == 2
    assert json.loads(one)["predictions"][0] != first
    assert error.error_code == 400 and "top_k" in error.message
