"""An inference port in this process with real models of tiny folders, each in its handler thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import transformers
import uvicorn
from tokenizers import Tokenizer, models, pre_tokenizers, processors

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

    async def close(self) -> None:
        assert self.batcher is not None
        if self.runner.loop is not None:
            shutdown = self.runner._handle.__self__.engine.shutdown()
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(shutdown, self.runner.loop))
        await self.batcher.close()

    def _run(self, requests: Any, emit: Any) -> Any:
        self.batches.append(len(requests))
        return self.runner.run(requests, emit)


@contextlib.contextmanager
def serve(served_models: Sequence[ServedModel]) -> Iterator[str]:
    """Serve the models on a port; yield its address, and restore the process afterwards."""
    directory, path, finders, before = os.getcwd(), list(sys.path), list(sys.meta_path), set(sys.modules)
    switch_interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    torch.set_num_threads(1)
    served = {model.name: model for model in served_models}
    listener = socket.create_server(("127.0.0.1", 0))
    ended = asyncio.Event()
    loop = asyncio.new_event_loop()

    ready: Future[None] = Future()

    async def serve_until_ended() -> None:
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
        config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_keep_alive=600)
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve([listener]))
        await ended.wait()
        server.should_exit = True
        await task
        for model in served_models:
            await model.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve_until_ended(),))
    thread.start()
    ready.result()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
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


def save_word_bert(folder: Path, model: Any = transformers.BertModel, **options: Any) -> Path:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=32,
    ).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, initializer_range=0.8, **options,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model(config).save_pretrained(folder)
    return folder
