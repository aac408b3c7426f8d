"""Tests of the handler ``image_text_to_text`` with a tiny LLaVA, compared with transformers' ``generate``."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from PIL import Image

import handlers
from handlers import HandlerLoadError, PredictionException, tasks
from handlers.context import Context, Row
from serve_app.model_store.served_target import read_target
from tests.support.hf_folders import (
    CHAT_TEMPLATE,
    encode_png,
    make_image,
    save_bert,
    save_byte_llama,
    save_llava,
)
from tests.support.served_models import ServedModel, serve

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.integration]

CAT, DOG = make_image(1), make_image(2)
GREEDY = {"temperature": 0, "max_tokens": 12}


def image_part(image: Image.Image | bytes) -> dict[str, Any]:
    content = image if isinstance(image, bytes) else encode_png(image)
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"},
    }


def ask(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}], **GREEDY, **fields}


class ServedChat:
    """A model folder loaded by the handler."""

    def __init__(self, folder: Path) -> None:
        self.entry = handlers.load("image_text_to_text", folder, {})
        self.context = Context("m", str(folder), {}, model_yaml_config={})
        self.entry.initialize(self.context)

    def __call__(self, *bodies: Any, **headers: str) -> list[Any]:
        rows = [Row({"body": json.dumps(body).encode()}) for body in bodies]
        ids = [str(index) for index in range(len(rows))]
        self.context.begin(ids, [headers] * len(rows), [{}] * len(rows))
        return self.entry(rows, self.context)

    def texts(self, *bodies: Any) -> list[str]:
        return [answer["choices"][0]["message"]["content"] for answer in self(*bodies)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def served(folder: Path) -> ServedChat:
    return ServedChat(folder)


def test_texts_equal_generate(folder: Path, served: ServedChat) -> None:
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()

    def reference(prompt: str, *images: Image.Image) -> tuple[str, int]:
        inputs = processor(text=[prompt], images=list(images) or None, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, length:]
        return processor.tokenizer.decode(ids, skip_special_tokens=True), length

    plain = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        **GREEDY,
    }
    bodies = [
        ask(image_part(CAT), "What?"),
        plain,
        ask("Compare", image_part(CAT), image_part(DOG)),
        ask(image_part(DOG), "What?"),
    ]
    expected = [
        reference("[user] <image>What?[assistant] ", CAT),
        reference("[system] Be brief.[user] Hi[assistant] "),
        reference("[user] Compare<image><image>[assistant] ", CAT, DOG),
        reference("[user] <image>What?[assistant] ", DOG),
    ]
    answers = served(*bodies)
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == [
        text for text, _ in expected
    ]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [length for _, length in expected]
    assert answers[0]["choices"][0]["message"] != answers[3]["choices"][0]["message"], "the image matters"
    assert (answers[0]["object"], answers[0]["choices"][0]["finish_reason"]) == ("chat.completion", "length")
    assert served.texts(*bodies[:1], bodies[2]) == [expected[0][0], expected[2][0]]


def test_an_instance_of_vertex_is_a_chat_with_images(served: ServedChat) -> None:
    envelope = handlers.load_envelope("vertex")(served.entry)
    chat = ask(image_part(CAT), "What?")
    [expected] = served.texts(chat)
    document = {"instances": [{"@requestFormat": "chatCompletions", **chat}]}
    shared = {"instances": [{"messages": chat["messages"]}], "parameters": GREEDY}
    served.context.begin(["0", "1"], [{}, {}], [{}, {}])
    single, several = envelope.handle([{"body": document}, {"body": shared}], served.context)
    assert single["predictions"]["choices"][0]["message"]["content"] == expected
    assert json.loads(several)["predictions"][0]["choices"] == single["predictions"]["choices"]


def test_choices_stops_and_seeds(served: ServedChat) -> None:
    [whole] = served.texts(ask(image_part(CAT), "What?"))
    [stopped] = served(ask(image_part(CAT), "What?", stop=whole[2:4]))
    choice = stopped["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (
        whole[: whole.index(whole[2:4])],
        "stop",
    )
    assert choice["stop_reason"] == whole[2:4]
    sampled = ask(image_part(CAT), "What?", temperature=1, seed=5, n=2)
    first, second = served(sampled, sampled)
    assert first["choices"] == second["choices"]
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert len(set(texts)) == 2 and first["usage"]["completion_tokens"] == 24


def test_invalid_rows_fail_alone(served: ServedChat) -> None:
    wide = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(wide, "PNG")
    url = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}}
    bodies = [
        ask(url),
        ask({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}),
        ask({"type": "image_url", "image_url": {}}),
        ask(image_part(b"no image")),
        ask(image_part(wide.getvalue())),
        ask({"type": "input_audio", "input_audio": {}}),
        ask(*[image_part(CAT)] * 17),
        ask(*[image_part(CAT)] * 16),
        ask("Write <image> here"),
        ask("Hi", tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required"),
        ask("Hi", logprobs=True),
        ask("Hi", response_format={"type": "json_object"}),
        ask("Hi", max_tokens=300),
        {"messages": []},
        ask("Hi"),
    ]
    answers = served(*bodies)
    assert [getattr(answer, "error_code", 200) for answer in answers] == [400] * 14 + [200]
    reasons = [
        *("this server fetches no images", "base64", "an image without its URL", "not an image", "pixels"),
        *("there are text and image_url", "17 images", "exceed the model's 256"),
        *("The processor does not take", "tools is not served", "logprobs is not served"),
        *("response_format is not served", "exceed", "messages"),
    ]
    for answer, reason in zip(answers, reasons):
        assert reason in answer.message
    [other] = served({"prompt": "Hi"}, url_path="v1/completions")
    assert "v1/chat/completions" in other.message
    assert served({}, describe="True")[0]["max_images"] == 16
    with pytest.raises(PredictionException, match="explains nothing"):
        served({}, explain="True")


def test_images_are_counted_before_one_is_decoded(
    served: ServedChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, broken = io.BytesIO(), image_part(encode_png(CAT)[:-30])
    Image.new("1", (4000, 4000)).save(large, "PNG")
    answers = served(
        ask(*[broken] * 17),
        ask(*[image_part(large.getvalue())] * 6, broken),
        ask(*[image_part(CAT)] * 2, n=9),
        ask(broken),
    )
    assert [answer.error_code for answer in answers] == [400] * 4
    reasons = ("17 images", "pixels together", "n times the images (2) is at most 16", "can be read")
    for answer, reason in zip(answers, reasons):
        assert reason in answer.message
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    [answer] = served(ask(*[image_part(large.getvalue())] * 6, broken))
    assert "can be read" in answer.message


def test_other_folders_are_rejected(tmp_path: Path) -> None:
    for folder, reason in (
        (save_bert("BertModel", tmp_path / "bert"), "transformers cannot load it"),
        (save_byte_llama(tmp_path / "llama"), "transformers cannot load it"),
        (save_llava(tmp_path / "llava", template=False), "no chat template"),
    ):
        with pytest.raises(HandlerLoadError, match=reason):
            ServedChat(folder)


def test_the_handler_is_selected_by_the_folder(folder: Path) -> None:
    assert tasks.reads_images_and_texts(folder)
    with pytest.raises(HandlerLoadError, match="register it with handler=image_text_to_text"):
        tasks.select_task(folder)
    assert read_target(str(folder)).handler == "image_text_to_text"


def test_openais_client_chats_about_images(folder: Path, tmp_path: Path, served: ServedChat) -> None:
    models = [
        ServedModel("eyes", folder, "image_text_to_text", {}),
        ServedModel(
            "blind",
            save_byte_llama(tmp_path, CHAT_TEMPLATE),
            "llm",
            {"engine": {"num_blocks": 16, "page_size": 16}},
        ),
    ]
    body: Any = ask(image_part(CAT), "What?")
    [expected] = served.texts(body)
    with (
        serve(models) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=60) as client,
    ):
        chat = client.chat.completions.create(model="eyes", **body)
        assert chat.choices[0].message.content == expected
        stream = client.chat.completions.create(
            model="eyes", stream=True, stream_options={"include_usage": True}, **body
        )
        chunks = list(stream)
        assert len(chunks) > 4 and chunks[-1].usage == chat.usage
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
        message = {"type": "message", "role": "user", "content": []}
        url = body["messages"][0]["content"][0]["image_url"]["url"]
        message["content"] = [
            {"type": "input_image", "image_url": url},
            {"type": "input_text", "text": "What?"},
        ]
        items: Any = [message]
        response = client.responses.create(model="eyes", input=items, temperature=0, max_output_tokens=12)
        assert response.output_text == expected
        with pytest.raises(openai.BadRequestError, match=r"'image_url', and this model reads texts only"):
            client.chat.completions.create(model="blind", **body)
