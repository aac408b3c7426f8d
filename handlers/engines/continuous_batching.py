"""The engine of transformers: one loop that takes requests in and lets them go at every step.

Its loop is not to be trusted with what it cannot do: a request that does not fit, or a token that is not in the
vocabulary, ends it for everybody. So requests are checked before, and a loop that has ended is made anew.

Of a model over several ranks each has such a loop. Before every step rank 0's tells the others what came and who
left, so all of them make the same steps; they wait for each other, and a loop that has ended on one of them has on
all: no rank can make another alone, and the ranks are replaced.
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
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from handlers import device, sharding
from handlers.engines.engine import Chunk, GenerationRequest, Logprob, Sampling, admit
from handlers.errors import HandlerLoadError, PredictionException

logger = logging.getLogger(__name__)

_CONTEXT = 4096  # tokens; models that take more get a cache for requests of this length unless told otherwise
_TOGETHER = 8  # so many of them side by side
_MEMORY = {"cpu": 0.25, "cuda": 0.6}  # of what is free once the model is loaded


@dataclass(eq=False)
class _Answer:
    request: GenerationRequest
    manager: Any
    outputs: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    sent: int = 0
    logprobs: list[Logprob] = field(default_factory=list)  # of all tokens so far, where they were asked for


class _Awake(threading.Event):
    """Never slept on: a rank that follows waits in its collective for rank 0, which comes by ten times a second."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


class ContinuousBatching:
    """transformers' continuous batching, for any causal language model that it can page; greedy equals ``generate``.

    Over several ranks each one has this engine, and rank 0 alone is asked to ``generate``.

    ``start`` loads the model. Options: ``num_blocks`` and ``page_size`` (tokens), whose product is the room for
    tokens of all requests together; ``max_batch_tokens``, of one step; ``dtype`` (``float32`` ...).
    """

    OPTIONS = ("num_blocks", "page_size", "max_batch_tokens", "dtype")

    def __init__(self, model: Any, sizes: Mapping[str, int], sharded: bool = False) -> None:
        self.model = model
        self.sharded = sharded
        self.sizes = dict(sizes)
        self.capacity = 0
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self._answers: dict[str, _Answer] = {}
        self._manager: Any = None
        self._sampler: Any = None
        self._lock = asyncio.Lock()
        self._closed = False

    @classmethod
    async def start(
        cls, folder: Path, gpu_id: int | None, options: Mapping[str, Any], tensor_parallel: int = 1
    ) -> ContinuousBatching:
        """The engine, with its loop running; on every one of ``tensor_parallel`` ranks at the same time."""
        import transformers

        how: dict[str, Any] = {"dtype": options.get("dtype", "auto"), "local_files_only": True}
        if tensor_parallel > 1:
            how["distributed_config"] = sharding.plan(folder, tensor_parallel, 1)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise HandlerLoadError(f"{folder}: this is no language model that generates text: {error}") from error
        if tensor_parallel == 1:
            model.to(device.choose(gpu_id))
        engine = cls(model.eval(), sizes(model, options, tensor_parallel), tensor_parallel > 1)
        try:
            await engine._running()
        except PredictionException as error:
            raise HandlerLoadError(error.message) from error
        return engine

    @property
    def use(self) -> float:
        page = self.sizes["page_size"]
        held = sum(math.ceil((len(a.request.prompt) + a.sent) / page) for a in self._answers.values())
        return min(1.0, held / self.sizes["num_blocks"])

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        admit(request, self.vocabulary, self.capacity)
        if request.id in self._answers:
            raise ValueError(f"a request {request.id!r} is under way already: give each an id of its own")
        answer = await self._submit(request)
        try:
            while True:
                output = await answer.outputs.get()
                while not answer.outputs.empty():  # each holds all tokens so far, so the latest is enough
                    output = answer.outputs.get_nowait()
                if output is None:
                    yield Chunk([], "abort")
                    return
                if isinstance(output, str) or output.error:
                    raise _lost() if self.sharded else _failed(output if isinstance(output, str) else output.error)
                tokens = output.generated_tokens[answer.sent :]
                logprobs = answer.logprobs[answer.sent : answer.sent + len(tokens)]
                answer.sent += len(tokens)
                if output.is_finished():
                    self._forget(answer)
                    ended = bool(tokens) and tokens[-1] in request.end
                    yield Chunk(tokens, "stop" if ended else "length", logprobs)
                    return
                yield Chunk(tokens, None, logprobs)
        finally:
            self._cancel(answer)

    async def abort(self, id: str) -> None:
        answer = self._answers.get(id)
        if answer is not None:
            self._cancel(answer)
            answer.outputs.put_nowait(None)  # the loop itself says nothing of what was cancelled

    async def check_health(self) -> None:
        if self._closed:
            raise RuntimeError("the engine was shut down")
        try:
            await self._running()
        except PredictionException as error:
            raise RuntimeError(error.message) from error

    async def shutdown(self) -> None:
        self._closed = True
        manager, self._manager = self._manager, None
        for id in list(self._answers):
            await self.abort(id)
        if manager is not None:
            await asyncio.to_thread(manager.stop, hard_stop=True, timeout=10)

    # The loop of transformers

    async def _submit(self, request: GenerationRequest) -> _Answer:
        sampling = request.sampling
        if sampling.seed is None:  # here, for all ranks
            sampling = replace(sampling, seed=secrets.randbits(63))
        while True:
            manager = await self._running()
            answer = self._answers[request.id] = _Answer(request, manager)
            if request.sampling.logprobs is not None:
                answer.logprobs = self._sampler.follow(request.id)
            manager.register_result_handler(request.id, answer.outputs.put_nowait)
            taken = manager.add_request(
                list(request.prompt),
                request_id=request.id,
                max_new_tokens=request.max_new_tokens,
                streaming=True,
                eos_token_id=list(request.end),
                sampling=sampling,
            )
            if taken is not None:
                return answer
            self._forget(answer)
            if self.sharded:
                raise _lost()
            await asyncio.sleep(0.01)  # it fails at this moment: once it has ended another is made

    def _cancel(self, answer: _Answer) -> None:
        """Free what the request holds, unless it is over."""
        if self._answers.get(answer.request.id) is answer:
            self._forget(answer)
            answer.manager.cancel_request(answer.request.id)

    def _forget(self, answer: _Answer) -> None:
        self._answers.pop(answer.request.id, None)
        self._sampler.forget(answer.request.id)
        router = answer.manager.output_router
        router.result_handlers.pop(answer.request.id, None)
        with contextlib.suppress(queue.Empty):  # where it puts what comes after that
            while True:
                router.output_queue.get_nowait()

    async def _running(self) -> Any:
        """The loop that takes requests now: a new one where there is none, or where the one before has ended."""
        async with self._lock:
            if self._closed:
                raise PredictionException("The model is being unloaded: send the request again.", 503)
            if self.sharded and self._manager is not None:
                ending = self._manager.background_thread_status.can_accept_new_requests() is not None
                if ending or not self._manager.is_running():
                    raise _lost()
            elif self._manager is None or not self._manager.is_running():
                await self._begin()
            return self._manager

    async def _begin(self) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        from handlers.engines import attention
        from handlers.engines.sampler import Sampler

        if self._manager is not None:
            self._manager.stop()  # it has ended: this frees its cache before there is another
        attention.leave(self.model)  # init_continuous_batching knows transformers' own alone
        manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1),
            continuous_batching_config=ContinuousBatchingConfig(
                **self.sizes,
                auto_switch_to_flash=False,  # it would look for kernels on the hub
                use_cuda_graph=False,  # a graph would draw the same random numbers each time
            ),
        )
        attention.use(self.model)
        processors = manager.logit_processor
        self._sampler = Sampler()
        processors.logits_processor.append(self._sampler)
        processors.tensors_required += 1
        processors.supported_keys["sampling"] = Sampling
        processors.do_processing = True
        if not manager.is_tp_driver:
            manager._wake_up_loop = _Awake()
        threading.Thread(target=self._watch, args=(manager, asyncio.get_running_loop()), daemon=True).start()
        while manager.batch_processor is None:
            await asyncio.sleep(0.01)
            error = manager.background_thread_status.fatal_error
            if error is not None:
                raise _failed(f"it does not start with {self.sizes}: {error}")
        self._manager = manager
        config = manager.continuous_batching_config
        self.sizes["num_blocks"] = config.num_blocks  # what there is, where it is less than was asked for
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.capacity = min(config.num_blocks * config.page_size, context or math.inf)

    def _watch(self, manager: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Tell those who wait that the loop has ended; it does not tell those who came in its last moment."""
        manager.start()  # here, because its thread is a daemon where the one that starts it is
        while manager.is_running():
            time.sleep(0.1)
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            loop.call_soon_threadsafe(self._ended, manager)

    def _ended(self, manager: Any) -> None:
        error = manager.background_thread_status.fatal_error
        if error is not None:
            logger.error("The generation loop has failed: %s: %s", type(error).__name__, error)
        for answer in list(self._answers.values()):
            if answer.manager is manager:
                answer.outputs.put_nowait(str(error or "it has ended"))


def sizes(model: Any, options: Mapping[str, Any], ranks: int = 1) -> dict[str, int]:
    """``num_blocks``, ``page_size`` and ``max_batch_tokens``: the options', or what suits the model and its memory.

    Without options there is room for eight requests of the model's context (of 4,096 tokens at most), in at most a
    quarter of the memory that is free on a CPU, 60 % on a GPU. Of a model over ``ranks`` each keeps its own heads'
    part of every token.
    """
    chosen = {key: options[key] for key in ("num_blocks", "page_size", "max_batch_tokens") if key in options}
    for key, value in chosen.items():
        least = 4 if key == "page_size" else 1
        if type(value) is not int or value < least:
            raise HandlerLoadError(f"model-config.yaml: engine.{key} is {value!r}; it is a whole number from {least}.")
    on_gpu = model.device.type != "cpu"
    page = chosen.setdefault("page_size", 256 if on_gpu else 32)
    chosen.setdefault("max_batch_tokens", 4096 if on_gpu else 256)
    if "num_blocks" not in chosen:
        config = model.config.get_text_config()
        context = min(getattr(config, "max_position_embeddings", None) or _CONTEXT, _CONTEXT)
        wanted = _TOGETHER * math.ceil(context / page)
        possible = int(_free(model.device) / (page * _bytes_of_a_token(model, config) / ranks))
        if possible < 1:
            raise HandlerLoadError("There is no memory left for the tokens of a single page: give the model more.")
        chosen["num_blocks"] = min(wanted, possible)
    return chosen


def _bytes_of_a_token(model: Any, config: Any) -> int:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * groups * width * model.dtype.itemsize


def _free(where: torch.device) -> float:
    if where.type == "cuda":
        return _MEMORY["cuda"] * torch.cuda.mem_get_info(where)[0]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks on this machine, which share its memory
    return _MEMORY["cpu"] / here * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _failed(why: str) -> PredictionException:
    return PredictionException(f"The generation loop failed ({why}). It is made anew: send the request again.", 503)


def _lost() -> PredictionException:
    why = "The ranks of this model do not generate together any more, because one is lost or its loop has failed. "
    return PredictionException(f"{why}All of them start anew: send the request again in some seconds.", 503)
