"""OpenAI's own client against a server with real models: a tiny Llama that chats, and a tiny BERT."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.protocols.http_app import inference_app
from serve_app.runtime.batching.async_batcher import AsyncBatcher
from serve_app.runtime.batching.batcher import Batcher
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.runner import Runner
from serve_app.settings import RuntimeSettings, Settings
from serve_app.telemetry.metrics import Meters
from tests.support.coroutine_backend import CoroutineBackend

pytestmark = pytest.mark.integration


TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"max_tokens": 30, "temperature": 0}
WORDS = ["cats", "hunt", "mice", "banks", "lend", "money"]


class ServedModel(CoroutineBackend):
    """The version 1.0 of a model in a handler thread; ``batches`` are the sizes of its batches."""

    def __init__(self, name: str, folder: Path, handler: str, config: dict[str, Any]) -> None:
        self.name, self.folder, self.batches = name, folder, []
        spec = ModelSpec(name, "1.0", "url", "", "", batch_size=4, config=config)
        manifest = {"model": {"modelName": name, "modelVersion": "1.0", "handler": handler}}
        self.runner = Runner(spec, folder, manifest, RuntimeSettings())
        self.batcher: Batcher | AsyncBatcher | None = None

    async def start(self) -> None:
        handler_thread, loop = HandlerThread(), asyncio.get_running_loop()
        await loop.run_in_executor(handler_thread, self.runner.load)
        ref, meters = ModelRef(self.name, "1.0"), Meters()
        if self.runner.loop is not None:
            self.batcher = AsyncBatcher(
                self.runner.run_async, self.runner.loop, ref, meters, handler_thread=handler_thread
            )
        else:
            self.batcher = Batcher(self._run, ref, meters, handler_thread=handler_thread, max_batch_size=4)

    async def infer(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        assert self.batcher is not None
        return await self.batcher.infer(request)

    def _run(self, requests: Any, emit: Any) -> Any:
        self.batches.append(len(requests))
        return self.runner.run(requests, emit)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, ServedModel]]]:
    """Start an inference port with both models; yield its address and the models by name."""
    directory, path, finders, before = os.getcwd(), list(sys.path), list(sys.meta_path), set(sys.modules)
    switch_interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    torch.set_num_threads(1)
    poet, sentences = llama(tmp_path_factory.mktemp("poet")), bert(tmp_path_factory.mktemp("sentences"))
    ranker = bert(tmp_path_factory.mktemp("ranker"), transformers.BertForSequenceClassification, num_labels=1)
    topics = bert(tmp_path_factory.mktemp("topics"), transformers.BertForSequenceClassification, num_labels=3)
    engine = {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}
    served_models = [
        ServedModel("poet", poet, "llm", {"engine": engine}),
        ServedModel("sentences", sentences, "huggingface", {"task": "sentence-embedding"}),
        ServedModel("ranker", ranker, "huggingface", {"task": "text-ranking"}),
        ServedModel("topics", topics, "huggingface", {}),
    ]
    served = {model.name: model for model in served_models}
    listener = socket.create_server(("127.0.0.1", 0))
    ended = asyncio.Event()
    loop = asyncio.new_event_loop()

    ready: Future[None] = Future()

    async def serve() -> None:
        try:
            for model in served_models:
                await model.start()
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        row = {"1.0": VersionRoute("1.0", "ready", 1, max_batch_size=4)}
        reader = RoutingTableReader(
            RoutingTable(1, {name: ModelRoute("1.0", row) for name in served}, startup_complete=True)
        )
        meters = Meters()
        plane = DataPlane(reader, meters, lambda ref, row: served[ref.name])
        app = inference_app(plane, Settings(), meters)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        task = asyncio.ensure_future(server.serve([listener]))
        await ended.wait()
        server.should_exit = True
        await task
        llm = served["poet"].runner
        shutdown = llm._handle.instance.engine.shutdown()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(shutdown, llm.loop))
        for model in served_models:
            await model.batcher.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.result()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", served
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()
    os.chdir(directory)
    sys.path[:], sys.meta_path[:] = path, finders
    sys.setswitchinterval(switch_interval)
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if name == "ts" or name.startswith("ts."):
            del sys.modules[name]
    gc.unfreeze()


def llama(folder: Path) -> Path:
    """Save an untrained model whose tokens are bytes, with a context of 256 tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate([*letters, "<end>"])}, merges=[])
    )
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, initializer_range=0.5, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def bert(folder: Path, model: Any = transformers.BertModel, **options: Any) -> Path:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    ).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, initializer_range=0.8, **options,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model(config).save_pretrained(folder)
    return folder


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["poet", "ranker", "sentences", "topics"]
    assert client.models.retrieve("poet:1.0").id == "poet:1.0"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("none")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("path", ["/v1", "/predictions/poet/1.0/v1"])
def test_chats_with_and_without_streaming(server: Any, path: str) -> None:
    with openai.OpenAI(base_url=server[0] + path, api_key="any", max_retries=0) as client:
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
        async with openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key="any", max_retries=0) as client:

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
    for other in ("topics", "sentences"):
        with pytest.raises(openai.BadRequestError, match=r"cross-encoder|text_pair"):
            client.post("/rerank", body={**body, "model": other}, cast_to=object)


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
    with pytest.raises(openai.BadRequestError, match="dimensions is not served") as raised:
        client.embeddings.create(model="sentences", input="a", dimensions=3)
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
