"""The engine on transformers' continuous batching: requests join and leave its loop at every step.

The loop fails for all requests on one that does not fit or has a token outside of the vocabulary. So the
engine validates requests first, and starts a new loop when one has failed.

With several ranks, each rank runs such a loop. Before every step, rank 0 broadcasts the new and the cancelled
requests, so all ranks run the same steps. The ranks wait for each other, so a loop that fails on one rank has
failed on all. No rank can start another alone: the ranks are replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from handlers.distributed import process_group
from handlers.engines.adapter_files import ADAPTER_OPTIONS, AdapterOptions
from handlers.engines.engine import (
    GenerationChunk,
    GenerationRequest,
    Logprob,
    SamplingParams,
    read_prefix_caching,
    validate_request,
)
from handlers.engines.lora import Adapter, AdapterTable
from handlers.engines.prompt_logprobs import PromptScorer
from handlers.engines.structured_output import GrammarCompiler
from handlers.errors import HandlerLoadError, PredictionException
from handlers.loading import device

logger = logging.getLogger(__name__)

_MAX_DEFAULT_CONTEXT = 4096  # tokens; the default cache is sized for requests of at most this length
_DEFAULT_CONCURRENCY = 8  # full-length requests that the default cache holds
_CACHE_MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.6}  # of the memory that is free after loading the model


@dataclass(eq=False)
class _TokenQueue:
    """The output of the loop for one request."""

    request: GenerationRequest
    manager: Any
    outputs: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    sent: int = 0
    cached_tokens: int | None = None  # of the prompt; None before the look-up, and without prefix caching
    logprobs: list[Logprob] = field(default_factory=list)  # of all tokens so far, if requested


class _NoWaitEvent(threading.Event):
    """An event whose ``wait`` returns at once.

    A rank other than 0 blocks in its collective until rank 0 joins, which happens ten times a second.
    """

    def wait(self, timeout: float | None = None) -> bool:
        return True


class ContinuousBatching:
    """An engine for any causal language model that transformers can page; greedy decoding equals
    ``generate``.

    With several ranks, each rank has this engine, and only rank 0's ``generate`` is called.

    ``start`` loads the model. Options: ``num_blocks`` and ``page_size`` (tokens), whose product is the token
    capacity of the cache for all requests; ``max_batch_tokens`` per step; ``dtype`` (``float32`` ...);
    ``prefix_caching``, true by default; those of ``AdapterOptions``.
    """

    OPTIONS = ("num_blocks", "page_size", "max_batch_tokens", "dtype", "prefix_caching", *ADAPTER_OPTIONS)

    def __init__(
        self,
        folder: Path,
        model: Any,
        sizes: Mapping[str, int],
        sharded: bool = False,
        prefix_caching: bool = True,
        adapter_options: AdapterOptions | None = None,
    ) -> None:
        self.model = model
        self._adapters = AdapterTable(model, adapter_options or AdapterOptions())
        self._prompt_scorer = PromptScorer(model, self._adapters)
        self.sharded = sharded
        self.sizes = dict(sizes)
        self.prefix_caching = prefix_caching
        self.capacity = 0
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self._grammars = GrammarCompiler(folder, self.vocab_size)
        self._token_queues: dict[str, _TokenQueue] = {}
        self._manager: Any = None
        self._sampler: Any = None
        self._lock = asyncio.Lock()
        self._adapter_lock = asyncio.Lock()
        self._closed = False

    @classmethod
    async def start(
        cls, folder: Path, gpu_id: int | None, options: Mapping[str, Any], tensor_parallel: int = 1
    ) -> ContinuousBatching:
        """Load the model and start its loop, on each of ``tensor_parallel`` ranks at the same time."""
        import transformers

        prefix_caching = read_prefix_caching(options)
        load_options: dict[str, Any] = {"dtype": options.get("dtype", "auto"), "local_files_only": True}
        load_options["trust_remote_code"] = False
        if tensor_parallel > 1:
            load_options["distributed_config"] = process_group.distributed_config(folder, tensor_parallel, 1)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **load_options)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise HandlerLoadError(
                f"{folder}: this is no language model that generates text: {error}"
            ) from error
        if tensor_parallel == 1:
            model.to(device.select_device(gpu_id))
        sizes = cache_sizes(model, options, tensor_parallel)
        adapter_options = AdapterOptions.read(options, folder)
        engine = cls(folder, model.eval(), sizes, tensor_parallel > 1, prefix_caching, adapter_options)
        try:
            await engine._ensure_running()
        except PredictionException as error:
            raise HandlerLoadError(error.message) from error
        return engine

    @property
    def adapters(self) -> Sequence[str]:
        return self._adapters.names

    async def load_adapter(self, name: str, folder: Path) -> None:
        if self.sharded:
            raise HandlerLoadError(
                "the engine transformers has adapters without tensor_parallel only: take it away, or take "
                "engine: {name: vllm}"
            )
        async with self._adapter_lock:
            await asyncio.to_thread(self._adapters.load, name, folder)

    async def unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)

    @property
    def cache_usage(self) -> float:
        page = self.sizes["page_size"]
        streams = self._token_queues.values()
        used = sum(math.ceil((len(stream.request.prompt) + stream.sent) / page) for stream in streams)
        return min(1.0, used / self.sizes["num_blocks"])

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        validate_request(request, self.vocab_size, self.capacity)
        adapter = None if request.adapter is None else self._adapters.get(request.adapter)
        if request.id in self._token_queues:
            raise ValueError(f"a request {request.id!r} is under way already: give each an id of its own")
        output_format = request.sampling.structured_output
        if request.prompt_logprobs is not None:
            scored = await self._score_prompt(request.prompt, request.prompt_logprobs, adapter)
            yield GenerationChunk([], None if request.max_new_tokens else "length", prompt_logprobs=scored)
            if not request.max_new_tokens:
                return
        matcher = None
        if output_format is not None:  # invalid ones must not reach the loop
            matcher = await asyncio.to_thread(self._grammars.compile, output_format, request.stop_token_ids)
        stream = await self._submit(request, adapter, matcher)
        try:
            while True:
                output = await stream.outputs.get()
                # Each output holds all tokens so far, so the latest is enough.
                while not stream.outputs.empty():
                    output = stream.outputs.get_nowait()
                if output is None:
                    yield GenerationChunk([], "abort")
                    return
                if isinstance(output, str) or output.error:
                    if self.sharded:
                        raise _ranks_lost()
                    raise _loop_failed(output if isinstance(output, str) else output.error)
                tokens = output.generated_tokens[stream.sent :]
                logprobs = stream.logprobs[stream.sent : stream.sent + len(tokens)]
                stream.sent += len(tokens)
                failure = self._sampler.find_failure(request.id)
                if failure is not None:
                    raise failure
                if output.is_finished():
                    self._forget(stream)
                    stopped = bool(tokens) and tokens[-1] in request.stop_token_ids
                    yield GenerationChunk(
                        tokens, "stop" if stopped else "length", logprobs, stream.cached_tokens
                    )
                    return
                yield GenerationChunk(tokens, None, logprobs, stream.cached_tokens)
        finally:
            self._cancel(stream)

    async def _score_prompt(
        self, prompt: Sequence[int], count: int, adapter: Adapter | None
    ) -> list[Logprob]:
        if self.sharded:
            raise PredictionException(
                "echo together with logprobs is not served with tensor_parallel by the engine transformers.",
                400,
            )
        return await self._prompt_scorer.score(prompt, count, adapter)

    async def abort(self, id: str) -> None:
        stream = self._token_queues.get(id)
        if stream is not None:
            self._cancel(stream)
            stream.outputs.put_nowait(None)  # the loop outputs nothing for a cancelled request

    async def check_health(self) -> None:
        if self._closed:
            raise RuntimeError("the engine was shut down")
        try:
            await self._ensure_running()
        except PredictionException as error:
            raise RuntimeError(error.message) from error

    async def shutdown(self) -> None:
        self._closed = True
        self._prompt_scorer.close()
        manager, self._manager = self._manager, None
        for id in list(self._token_queues):
            await self.abort(id)
        if manager is not None:
            await asyncio.to_thread(manager.stop, hard_stop=True, timeout=10)

    # The loop of transformers

    async def _submit(self, request: GenerationRequest, adapter: Adapter | None, matcher: Any) -> _TokenQueue:
        sampling = request.sampling
        if sampling.seed is None:  # drawn here, so that all ranks use the same
            sampling = replace(sampling, seed=secrets.randbits(63))
        while True:
            manager = await self._ensure_running()
            stream = self._token_queues[request.id] = _TokenQueue(request, manager)
            if request.sampling.logprobs is not None:
                stream.logprobs = self._sampler.record_logprobs(request.id)
            if matcher is not None:
                self._sampler.keep_matcher(request.id, matcher)
            manager.register_result_handler(request.id, stream.outputs.put_nowait)
            accepted = manager.add_request(
                list(request.prompt),
                request_id=request.id,
                max_new_tokens=request.max_new_tokens,
                streaming=True,
                eos_token_id=list(request.stop_token_ids),
                sampling=sampling,
                cache_salt=request.cache_salt if adapter is None else adapter.salt(request.cache_salt),
                **({} if adapter is None else {"adapter": adapter}),
            )
            if accepted is not None:
                return stream
            self._forget(stream)
            if self.sharded:
                raise _ranks_lost()
            await asyncio.sleep(0.01)  # the loop is failing: retry until it has ended and is replaced

    def _cancel(self, stream: _TokenQueue) -> None:
        """Cancel the request and free its cache, unless it has finished."""
        if self._token_queues.get(stream.request.id) is stream:
            self._forget(stream)
            stream.manager.cancel_request(stream.request.id)

    def _forget(self, stream: _TokenQueue) -> None:
        self._token_queues.pop(stream.request.id, None)
        self._sampler.forget(stream.request.id)
        router = stream.manager.output_router
        router.result_handlers.pop(stream.request.id, None)
        with contextlib.suppress(queue.Empty):  # later output of the request goes there
            while True:
                router.output_queue.get_nowait()

    async def _ensure_running(self) -> Any:
        """Return the running loop; start a new one where there is none or the last one has ended."""
        async with self._lock:
            if self._closed:
                raise PredictionException("The model is being unloaded: send the request again.", 503)
            if self.sharded and self._manager is not None:
                stopping = self._manager.background_thread_status.can_accept_new_requests() is not None
                if stopping or not self._manager.is_running():
                    raise _ranks_lost()
            elif self._manager is None or not self._manager.is_running():
                await self._start_loop()
            return self._manager

    async def _start_loop(self) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        from handlers.engines import attention, prefix_cache
        from handlers.engines.sampler import Sampler

        if self._manager is not None:
            self._manager.stop()  # it has ended: free its cache before allocating another
            self._adapters.detach()
        # init_continuous_batching accepts transformers' own implementations only.
        attention.disable(self.model)
        manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1),
            continuous_batching_config=ContinuousBatchingConfig(
                **self.sizes,
                allow_block_sharing=self.prefix_caching,
                auto_switch_to_flash=False,  # true would search the hub for kernels
                use_cuda_graph=False,  # a graph would repeat the same random numbers
            ),
        )
        attention.enable(self.model)
        processors = manager.logit_processor
        self._sampler = Sampler(self._grammars.compile)
        processors.logits_processor.append(self._sampler)
        processors.tensors_required += 1
        processors.supported_keys |= {"sampling": SamplingParams, "cache_salt": str, "adapter": Adapter}
        processors.do_processing = True
        if self.prefix_caching:
            prefix_cache.install(manager, self._record_lookup)
        if not manager.is_tp_driver:
            manager._wake_up_loop = _NoWaitEvent()
        threading.Thread(target=self._watch, args=(manager, asyncio.get_running_loop()), daemon=True).start()
        while manager.batch_processor is None:
            await asyncio.sleep(0.01)
            error = manager.background_thread_status.fatal_error
            if error is not None:
                raise _loop_failed(f"it does not start with {self.sizes}: {error}")
        self._adapters.attach(manager.batch_processor)
        self._manager = manager
        config = manager.continuous_batching_config
        self.sizes["num_blocks"] = config.num_blocks  # the allocated number may be lower than the option
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.capacity = min(config.num_blocks * config.page_size, context or math.inf)

    def _record_lookup(self, id: str, cached_tokens: int) -> None:
        """Store how much of a prompt was cached; on the loop's thread, before its first step."""
        stream = self._token_queues.get(id)  # ranks other than 0 have none
        if stream is not None:
            stream.cached_tokens = cached_tokens

    def _watch(self, manager: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop; when it ends, fail its open streams, as it misses requests of its last moment."""
        manager.start()  # from this thread: its own thread inherits the daemon flag
        while manager.is_running():
            time.sleep(0.1)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(self._on_loop_end, manager)

    def _on_loop_end(self, manager: Any) -> None:
        error = manager.background_thread_status.fatal_error
        if error is not None:
            logger.error("The generation loop has failed: %s: %s", type(error).__name__, error)
        for stream in list(self._token_queues.values()):
            if stream.manager is manager:
                stream.outputs.put_nowait(str(error or "it has ended"))


def cache_sizes(
    model: Any, options: Mapping[str, Any], ranks: int = 1, memory: float | None = None
) -> dict[str, int]:
    """Return ``num_blocks``, ``page_size`` and ``max_batch_tokens`` from the options or from the free memory.

    The default cache holds eight requests of the model's context (at most 4,096 tokens), within a quarter of
    the free memory on a CPU and 60 % on a GPU, or ``memory`` bytes. Each of ``ranks`` keeps only its own
    heads' part of a token.
    """
    sizes = {key: options[key] for key in ("num_blocks", "page_size", "max_batch_tokens") if key in options}
    for key, value in sizes.items():
        minimum = 4 if key == "page_size" else 1
        if type(value) is not int or value < minimum:
            raise HandlerLoadError(
                f"model-config.yaml: engine.{key} is {value!r}; it is a whole number from {minimum}."
            )
    on_gpu = model.device.type != "cpu"
    page = sizes.setdefault("page_size", 256 if on_gpu else 32)
    sizes.setdefault("max_batch_tokens", 4096 if on_gpu else 256)
    if "num_blocks" not in sizes:
        config = model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None) or _MAX_DEFAULT_CONTEXT
        desired = _DEFAULT_CONCURRENCY * math.ceil(min(context, _MAX_DEFAULT_CONTEXT) / page)
        memory = _cache_memory(model.device) if memory is None else memory
        affordable = int(memory / (page * _bytes_per_token(model, config) / ranks))
        if affordable < 1:
            raise HandlerLoadError(
                "There is no memory left for the tokens of a single page: give the model more."
            )
        sizes["num_blocks"] = min(desired, affordable)
    return sizes


def cache_bytes(free: int, remaining: int | None) -> float:
    """Return the bytes of a cache on a GPU with ``free`` bytes, of which a share has ``remaining``."""
    return _CACHE_MEMORY_SHARE["cuda"] * (free if remaining is None else min(free, remaining))


def _bytes_per_token(model: Any, config: Any) -> int:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * groups * width * model.dtype.itemsize


def _cache_memory(target: torch.device) -> float:
    """Return how many bytes of ``target`` the cache may take."""
    if target.type == "cuda":
        return cache_bytes(torch.cuda.mem_get_info(target)[0], device.remaining_gpu_bytes(target))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # they share this machine's memory
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _CACHE_MEMORY_SHARE["cpu"] / local_ranks * free


def _loop_failed(reason: str) -> PredictionException:
    return PredictionException(
        f"The generation loop failed ({reason}). It is being restarted: send the request again.", 503
    )


def _ranks_lost() -> PredictionException:
    return PredictionException(
        "The ranks of this model do not generate together any more, because one is lost or its loop has "
        "failed. All of them are restarted: send the request again in some seconds.",
        503,
    )
