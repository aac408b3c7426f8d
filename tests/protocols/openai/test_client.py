"""OpenAI's own client against a server with real models: a tiny Llama that chats, and a tiny BERT."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers

from tests.support.hf_folders import CHAT_TEMPLATE, save_byte_llama
from tests.support.served_models import ServedModel, save_word_bert, serve

pytestmark = pytest.mark.integration


HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"max_tokens": 30, "temperature": 0}
OPTIONS: Any = {"api_key": "any", "max_retries": 0, "timeout": 60}  # its own timeout to connect is 5 s


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, ServedModel]]]:
    """Start an inference port with the models; yield its address and the models by name."""
    classifier = transformers.BertForSequenceClassification
    poet = save_byte_llama(tmp_path_factory.mktemp("poet"), CHAT_TEMPLATE, key_value_heads=4)
    sentences = save_word_bert(tmp_path_factory.mktemp("sentences"))
    ranker = save_word_bert(tmp_path_factory.mktemp("ranker"), classifier, num_labels=1)
    topics = save_word_bert(tmp_path_factory.mktemp("topics"), classifier, num_labels=3)
    engine = {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}
    served = [
        ServedModel("features", sentences, "huggingface", {"task": "feature-extraction"}),
        ServedModel("poet", poet, "llm", {"engine": engine}),
        ServedModel("sentences", sentences, "huggingface", {"task": "sentence-embedding"}),
        ServedModel("ranker", ranker, "huggingface", {"task": "text-ranking"}),
        ServedModel("topics", topics, "huggingface", {}),
    ]
    with serve(served) as address:
        yield address, {model.name: model for model in served}


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[0]}/v1", **OPTIONS) as client:
        yield client


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [
        *("features", "poet", "ranker", "sentences", "topics")
    ]
    assert client.models.retrieve("poet:1.0").id == "poet:1.0"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("none")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("path", ["/v1", "/predictions/poet/1.0/v1"])
def test_chats_with_and_without_streaming(server: Any, path: str) -> None:
    with openai.OpenAI(base_url=server[0] + path, **OPTIONS) as client:
        client.chat.completions.create(model="poet", messages=HELLO, **GREEDY)  # caches the prompt
        chat = client.chat.completions.create(model="poet", messages=HELLO, **GREEDY)
        assert (chat.choices[0].finish_reason, chat.choices[0].message.role) == ("length", "assistant")
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (
            len("[user] Hello\n[assistant] "),
            30,
        )
        options: Any = {"include_usage": True}
        with client.chat.completions.create(
            model="poet", messages=HELLO, stream=True, stream_options=options, **GREEDY
        ) as stream:
            assert stream.response.headers["content-type"] == "text/event-stream"
            chunks = list(stream)
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == chat.choices[0].message.content
        )
        assert (chunks[-1].usage, chunks[-2].choices[0].finish_reason) == (chat.usage, "length")
        assert len(chunks) > 4


def test_completions_with_options(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model="poet:1.0", prompt=["Roses", "Violets"], n=2, seed=3, max_tokens=8, logprobs=2
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in completion.choices}) == 4
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 8 and all(len(top) <= 2 for top in logprobs.top_logprobs)
    text = completion.choices[0].text
    again = client.completions.create(
        model="poet", prompt="Roses", seed=3, max_tokens=8, stop=text[3:5], echo=True
    )
    assert (again.choices[0].text, again.choices[0].finish_reason) == (
        "Roses" + text[: text.index(text[3:5])],
        "stop",
    )
    stream = client.completions.create(model="poet", prompt="Roses", seed=3, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == text


def test_concurrent_chats_get_their_own_texts(server: Any) -> None:
    async def chat_concurrently() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server[0]}/v1", **OPTIONS) as client:

            async def chat(name: str) -> str:
                completion = await client.chat.completions.create(
                    model="poet", messages=[{"role": "user", "content": name}], **GREEDY
                )
                return completion.choices[0].message.content or ""

            async def stream_chat(name: str) -> str:
                stream = await client.chat.completions.create(
                    model="poet", messages=[{"role": "user", "content": name}], stream=True, **GREEDY
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            names = [f"Hello {i}" for i in range(6)]
            texts = await asyncio.gather(*map(chat, names), *map(stream_chat, names))
            assert texts[:6] == texts[6:]
            return texts

    assert len(set(asyncio.run(chat_concurrently()))) == 6


def test_embeddings_share_batches(server: Any, client: openai.OpenAI) -> None:
    texts = ["cats hunt mice", "banks lend", "mice", "cats", "money", "banks", "hunt", "lend"]
    served = server[1]["sentences"]
    served.batches.clear()
    response = client.embeddings.create(
        model="sentences", input=texts
    )  # in base64, the default of this client
    assert sum(served.batches) == 8 and max(served.batches) > 1, "rows share batches"
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (11 + 16, 11 + 16), (
        "with [CLS] and [SEP]"
    )
    plain = client.embeddings.create(model="sentences", input=texts, encoding_format="float")
    for default, other in zip(response.data, plain.data, strict=True):
        assert default.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert np.linalg.norm(default.embedding) == pytest.approx(1, abs=1e-5)
    alone = client.embeddings.create(model="sentences", input="mice", encoding_format="float")
    assert alone.data[0].embedding == pytest.approx(plain.data[2].embedding, abs=1e-5)


def test_a_model_of_token_vectors_has_embeddings(server: Any, client: openai.OpenAI) -> None:
    texts = ["cats hunt mice", "banks"]
    expected = client.embeddings.create(model="sentences", input=texts)
    pooled = client.embeddings.create(model="features", input=texts)
    assert pooled.usage == expected.usage
    for row, expected_row in zip(pooled.data, expected.data, strict=True):
        assert row.embedding == pytest.approx(expected_row.embedding, abs=1e-6)
    tokenizer = transformers.AutoTokenizer.from_pretrained(server[1]["features"].folder)
    ids: Any = tokenizer(texts)["input_ids"]
    by_ids = client.embeddings.create(model="features", input=ids)
    assert [row.embedding for row in by_ids.data] == [row.embedding for row in pooled.data]
    alone = client.embeddings.create(model="sentences", input=ids[0], dimensions=4).data[0].embedding
    first = np.array(pooled.data[0].embedding)[:4]
    assert alone == pytest.approx(first / np.linalg.norm(first), abs=1e-6)
    with pytest.raises(openai.BadRequestError, match=r"no token 99999.*another tokenizer"):
        client.embeddings.create(model="features", input=[99999])
    with pytest.raises(openai.BadRequestError, match=r"no output sentence_embedding; there are label"):
        client.embeddings.create(model="topics", input="a")


def test_documents_are_ranked_by_a_cross_encoder(server: Any, client: openai.OpenAI) -> None:
    query, documents = "cats hunt", ["banks lend money", "mice", "cats hunt mice", "money", "lend"]
    served = server[1]["ranker"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(served.folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(served.folder)
    encoded = tokenizer([query] * 5, documents, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**encoded).logits[:, 0].sigmoid().tolist()
    tokens = int(encoded["attention_mask"].sum())
    served.batches.clear()
    body = {"model": "ranker", "text_1": query, "text_2": documents}
    scored: Any = client.post("/score", body=body, cast_to=object)
    assert [row["score"] for row in scored["data"]] == pytest.approx(expected, abs=1e-5)
    assert scored["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert sum(served.batches) == 5 and max(served.batches) > 1, "rows share batches"
    body = {"model": "ranker:1.0", "query": query, "documents": documents, "top_n": 3}
    ranked: Any = client.post("/rerank", body=body, cast_to=object)
    best = sorted(range(5), key=lambda index: -expected[index])[:3]
    assert [row["index"] for row in ranked["results"]] == best
    assert [row["document"]["text"] for row in ranked["results"]] == [documents[index] for index in best]
    assert ranked["results"][0]["relevance_score"] == pytest.approx(max(expected), abs=1e-5)
    for other, reason in (
        ("topics", "cross-encoder, which has one label; this model has 3"),
        ("sentences", "no output score; there are sentence_embedding"),
        ("features", "no output score; there are token_embeddings"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            client.post("/rerank", body={**body, "model": other}, cast_to=object)


def test_half_of_a_surrogate_pair_is_no_text(server: Any) -> None:
    long_number = "1" * 30  # of which the body is read by the standard library
    for path, text in (
        ("rerank", '"query": "\\ud800", "documents": ["a"]'),
        ("embeddings", '"input": "\\ud800"'),
    ):
        body = f'{{"model": "ranker", {text}, "x": {long_number}}}'
        response = httpx.post(f"{server[0]}/v1/{path}", content=body, timeout=60)
        assert response.status_code == 400, response.text


def test_a_text_is_constrained_by_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    params: Any = {"model": "poet", "messages": HELLO, "max_tokens": 150, "response_format": response_format}
    chat = client.chat.completions.create(**params, seed=1)
    assert chat.choices[0].finish_reason == "stop"
    assert set(json.loads(chat.choices[0].message.content or "")) == {"ok"}
    chunks = client.chat.completions.create(**params, seed=1, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat.choices[0].message.content
    response_format["json_schema"]["schema"] = {"type": "none"}
    with pytest.raises(
        openai.BadRequestError, match=r"response_format\.json_schema\.schema: Invalid type: none"
    ):
        client.chat.completions.create(**params)


def test_responses_with_and_without_streaming(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="poet", messages=HELLO, **GREEDY)
    params: Any = {"model": "poet", "input": "Hello", "max_output_tokens": 30, "temperature": 0}
    whole = client.responses.create(**params)
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.store) == ("incomplete", False)
    assert whole.usage is not None and chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 30)
    with client.responses.stream(**params) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last: Any = events[-1]
    assert last.type == "response.incomplete"
    assert len(deltas) > 2 and "".join(deltas) == last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == 30
    with pytest.raises(openai.BadRequestError, match="keeps no responses") as raised:
        client.responses.create(**params, previous_response_id=whole.id)
    assert raised.value.param == "previous_response_id"
    rated = client.responses.create(**params, include=["message.output_text.logprobs"], top_logprobs=2)
    content: Any = rated.output[0]
    assert len(content.content[0].logprobs) == 30


def test_responses_have_formats_and_tools(client: openai.OpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    params: Any = {"model": "poet", "input": "Hello", "max_output_tokens": 200, "extra_body": {"seed": 1}}
    format: Any = {"type": "json_schema", "name": "answer", "schema": schema}
    formatted = client.responses.create(**params, text={"format": format})
    assert set(json.loads(formatted.output_text)) == {"ok"}
    tools: Any = [{"type": "function", "name": "f", "parameters": schema}]
    called = client.responses.create(**params, tools=tools, tool_choice="required", parallel_tool_calls=False)
    call: Any = called.output[0]
    assert (call.type, call.name, called.status) == ("function_call", "f", "completed")
    assert set(json.loads(call.arguments)) == {"ok"}
    events = list(
        client.responses.create(
            **params, tools=tools, tool_choice={"type": "function", "name": "f"}, stream=True
        )
    )
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert set(json.loads(done.arguments)) == {"ok"}


def test_messages_of_anthropics_api(server: Any, client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="poet", messages=HELLO, **GREEDY)
    text, usage = chat.choices[0].message.content or "", chat.usage
    assert usage is not None
    params = {"model": "poet", "messages": HELLO, **GREEDY}
    url, headers = f"{server[0]}/v1/messages", {"x-api-key": "any"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        whole = http.post("", json=params).json()
        assert whole["content"] == [{"type": "text", "text": text}]
        assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("max_tokens", 30)
        lines = http.post("", json={**params, "stream": True}).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        assert len(deltas) > 2 and "".join(deltas) == text
        stopped = http.post("", json={**params, "stop_sequences": ["zzzz", text[3:5]]}).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[3:5])
        assert stopped["content"][0]["text"] == text[: text.index(text[3:5])]
        count = http.post("/count_tokens", json={"model": "poet", "messages": HELLO}).json()
        assert count == {"input_tokens": usage.prompt_tokens}
        other = http.post("/count_tokens", json={"model": "topics", "messages": HELLO})
        assert (other.status_code, other.json()["type"]) == (400, "error")


def test_invalid_requests_are_rejected(client: openai.OpenAI) -> None:
    for error_class, code, param, body in (
        (openai.NotFoundError, "model_not_found", "model", {"model": "none"}),
        (openai.NotFoundError, "model_not_found", "model", {"model": "poet:9"}),
        (openai.BadRequestError, "handler_rejected", None, {"model": "poet", "max_tokens": 999}),
        (
            openai.BadRequestError,
            "handler_rejected",
            None,
            {"model": "poet", "tools": [{"type": "function", "function": {"name": "f"}}]},
        ),
    ):
        with pytest.raises(error_class) as raised:
            client.chat.completions.create(messages=HELLO, **body)
        assert (raised.value.code, raised.value.param) == (code, param)
        assert raised.value.request_id
    with pytest.raises(openai.NotFoundError, match="Unknown API endpoint: v1/embeddings"):
        client.embeddings.create(model="poet", input="a")
    with pytest.raises(openai.BadRequestError, match="dimensions is 17, and the model's vectors") as raised:
        client.embeddings.create(model="sentences", input="a", dimensions=17)
    assert raised.value.param == "dimensions"
    for texts in ("a", ["a", "b"]):
        raw = client.embeddings.with_raw_response.create(
            model="sentences", input=texts, extra_body={"zz": 1, "user": "me"}
        )
        assert raw.headers["x-torchrelay-ignored"] == "zz"


def test_a_closed_stream_frees_its_place(server: Any, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="poet", prompt="Roses", max_tokens=240, stream=True)
    next(iter(stream))
    stream.close()
    batcher, polls = server[1]["poet"].batcher, 0
    while batcher.pending and polls < 6000:
        threading.Event().wait(0.01)
        polls += 1
    assert not batcher.pending
