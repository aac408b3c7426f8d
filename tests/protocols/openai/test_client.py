"""OpenAI's own client, unmodified, against our doors over real models: a tiny Llama that chats, and a tiny BERT."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from serve_app.dataplane import DataPlane, TableReader
from serve_app.doors.app import inference_app
from serve_app.runtime.author import Author
from serve_app.runtime.batcher import Batcher
from serve_app.runtime.concurrent import ConcurrentBatcher
from serve_app.runtime.runner import Runner
from serve_app.settings import RuntimeSettings, Settings
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, ModelRef, ModelRow, ModelSpec, Reply, ReplyStream, Table, VersionRow

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"max_tokens": 30, "temperature": 0}
WORDS = ["cats", "hunt", "mice", "banks", "lend", "money"]


class Served:
    """The version 1.0 of a model, in its author's thread; ``batches`` are the sizes of those that ran."""

    def __init__(self, name: str, folder: Path, handler: str, config: dict[str, Any]) -> None:
        self.name, self.batches = name, []
        spec = ModelSpec(name, "1.0", "url", "", "", batch_size=4, config=config)
        manifest = {"model": {"modelName": name, "modelVersion": "1.0", "handler": handler}}
        self.runner = Runner(spec, folder, manifest, RuntimeSettings())
        self.batcher: Batcher | ConcurrentBatcher | None = None

    async def start(self) -> None:
        author, loop = Author(), asyncio.get_running_loop()
        await loop.run_in_executor(author, self.runner.load)
        ref, meters = ModelRef(self.name, "1.0"), Meters()
        if self.runner.loop is not None:
            self.batcher = ConcurrentBatcher(self.runner.run_async, self.runner.loop, ref, meters, author=author)
        else:
            self.batcher = Batcher(self._run, ref, meters, author=author, max_batch_size=4)

    async def infer(self, call: Call) -> Reply | ReplyStream:
        assert self.batcher is not None
        return await self.batcher.submit(call)

    def _run(self, calls: Any, emit: Any) -> Any:
        self.batches.append(len(calls))
        return self.runner.run(calls, emit)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Served]]]:
    """The address of an inference port with both models, and these."""
    where, path, finders, before = os.getcwd(), list(sys.path), list(sys.meta_path), set(sys.modules)
    turn, threads = sys.getswitchinterval(), torch.get_num_threads()
    torch.set_num_threads(1)
    poet, sentences = llama(tmp_path_factory.mktemp("poet")), bert(tmp_path_factory.mktemp("sentences"))
    engine = {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}
    made = [
        Served("poet", poet, "llm", {"engine": engine}),
        Served("sentences", sentences, "huggingface", {"task": "sentence-embedding"}),
    ]
    served = {one.name: one for one in made}
    listener = socket.create_server(("127.0.0.1", 0))
    ended = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        for one in made:
            await one.start()
        row = {"1.0": VersionRow("1.0", "ready", 1, max_batch_size=4)}
        reader = TableReader(Table(1, {name: ModelRow("1.0", row) for name in served}, settled=True))
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
        for one in made:
            await one.batcher.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", served
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()
    os.chdir(where)
    sys.path[:], sys.meta_path[:] = path, finders
    sys.setswitchinterval(turn)
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if name == "ts" or name.startswith("ts."):
            del sys.modules[name]
    gc.unfreeze()


def llama(folder: Path) -> Path:
    """It never learnt anything, and its tokens are bytes; 256 of them are its context."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate([*letters, "<end>"])}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, initializer_range=0.5, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def bert(folder: Path) -> Path:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    ).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, initializer_range=0.8,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="any", max_retries=0, timeout=30) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["poet", "sentences"]
    assert client.models.retrieve("poet:1.0").id == "poet:1.0"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("none")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("place", ["/v1", "/predictions/poet/1.0/v1"])
def test_a_chat_whole_and_in_pieces(server: Any, place: str) -> None:
    with openai.OpenAI(base_url=server[0] + place, api_key="any", max_retries=0) as client:
        whole = client.chat.completions.create(model="poet", messages=HELLO, **GREEDY)
        assert (whole.choices[0].finish_reason, whole.choices[0].message.role) == ("length", "assistant")
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len("[user] Hello\n[assistant] "), 30)
        options: Any = {"include_usage": True}
        with client.chat.completions.create(
            model="poet", messages=HELLO, stream=True, stream_options=options, **GREEDY
        ) as stream:
            assert stream.response.headers["content-type"] == "text/event-stream"
            chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
        assert (chunks[-1].usage, chunks[-2].choices[0].finish_reason) == (whole.usage, "length")
        assert len(chunks) > 4


def test_completions(client: openai.OpenAI) -> None:
    said = client.completions.create(
        model="poet:1.0", prompt=["Roses", "Violets"], n=2, seed=3, max_tokens=8, logprobs=2
    )
    assert [choice.index for choice in said.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in said.choices}) == 4
    first = said.choices[0].logprobs
    assert first is not None and first.top_logprobs is not None and first.token_logprobs is not None
    assert len(first.token_logprobs) == 8 and all(len(one) <= 2 for one in first.top_logprobs)
    text = said.choices[0].text
    again = client.completions.create(model="poet", prompt="Roses", seed=3, max_tokens=8, stop=text[3:5], echo=True)
    assert (again.choices[0].text, again.choices[0].finish_reason) == ("Roses" + text[: text.index(text[3:5])], "stop")
    pieces = client.completions.create(model="poet", prompt="Roses", seed=3, max_tokens=8, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text


def test_many_at_once(server: Any) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key="any", max_retries=0) as client:

            async def whole(name: str) -> str:
                said = await client.chat.completions.create(
                    model="poet", messages=[{"role": "user", "content": name}], **GREEDY
                )
                return said.choices[0].message.content or ""

            async def in_pieces(name: str) -> str:
                stream = await client.chat.completions.create(
                    model="poet", messages=[{"role": "user", "content": name}], stream=True, **GREEDY
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            names = [f"Hello {i}" for i in range(6)]
            told = await asyncio.gather(*map(whole, names), *map(in_pieces, names))
            assert told[:6] == told[6:]
            return told

    assert len(set(asyncio.run(ask()))) == 6


def test_embeddings(server: Any, client: openai.OpenAI) -> None:
    texts = ["cats hunt mice", "banks lend", "mice", "cats", "money", "banks", "hunt", "lend"]
    served = server[1]["sentences"]
    served.batches.clear()
    said = client.embeddings.create(model="sentences", input=texts)  # in base64, as this client asks by itself
    assert sum(served.batches) == 8 and max(served.batches) > 1, "rows share batches"
    assert (said.usage.prompt_tokens, said.usage.total_tokens) == (11 + 16, 11 + 16), "with [CLS] and [SEP]"
    plain = client.embeddings.create(model="sentences", input=texts, encoding_format="float")
    for one, other in zip(said.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
    alone = client.embeddings.create(model="sentences", input="mice", encoding_format="float")
    assert alone.data[0].embedding == pytest.approx(plain.data[2].embedding, abs=1e-5)


def test_what_is_refused(client: openai.OpenAI) -> None:
    for refused, code, param, ask in (
        (openai.NotFoundError, "model_not_found", "model", {"model": "none"}),
        (openai.NotFoundError, "model_not_found", "model", {"model": "poet:9"}),
        (openai.BadRequestError, "handler_said", None, {"model": "poet", "max_tokens": 999}),
        (openai.BadRequestError, "handler_said", None, {"model": "poet", "tools": [{"type": "function"}]}),
    ):
        with pytest.raises(refused) as raised:
            client.chat.completions.create(messages=HELLO, **ask)
        assert (raised.value.code, raised.value.param) == (code, param)
        assert raised.value.request_id
    with pytest.raises(openai.NotFoundError, match="Unknown API endpoint: v1/embeddings"):
        client.embeddings.create(model="poet", input="a")
    with pytest.raises(openai.BadRequestError, match="dimensions is not served") as raised:
        client.embeddings.create(model="sentences", input="a", dimensions=3)
    assert raised.value.param == "dimensions"


def test_one_that_leaves_frees_its_place(server: Any, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="poet", prompt="Roses", max_tokens=240, stream=True)
    next(iter(stream))
    stream.close()
    batcher, waited = server[1]["poet"].batcher, 0
    while batcher.pending and waited < 6000:
        threading.Event().wait(0.01)
        waited += 1
    assert not batcher.pending
