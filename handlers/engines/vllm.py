"""An adapter of vLLM's engine, which needs a GPU and pins its own version of torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from handlers.engines.adapter_files import ADAPTER_OPTIONS, AdapterOptions, read_config, unknown_adapter
from handlers.engines.engine import (
    GenerationChunk,
    GenerationRequest,
    Logprob,
    StructuredOutput,
    read_prefix_caching,
    validate_request,
)
from handlers.errors import HandlerLoadError, PredictionException
from handlers.loading import device
from handlers.loading.gpu_budget import GpuBudget


class VLLM:
    """An engine that runs vLLM's ``AsyncLLM``; the option ``arguments`` holds its ``AsyncEngineArgs``.

    ``prefix_caching`` is vLLM's ``enable_prefix_caching``. vLLM reserves memory for adapters, so it has them
    only where ``max_adapters`` or ``enable_lora`` is set.
    """

    OPTIONS = ("arguments", "prefix_caching", *ADAPTER_OPTIONS)

    def __init__(
        self, engine: Any, capacity: int, vocab_size: int, adapter_options: AdapterOptions | None
    ) -> None:
        self.capacity = capacity
        self.vocab_size = vocab_size
        self._engine = engine
        self._adapter_options = adapter_options  # None: it was started without adapters
        self._adapters: dict[str, Any] = {}  # LoRARequests by name
        self._last_adapter_id = 0

    @classmethod
    async def start(
        cls, folder: Path, gpu_id: int | None, options: Mapping[str, Any], tensor_parallel: int = 1
    ) -> VLLM:
        """Load the model on the replica's GPU and return its engine."""
        if tensor_parallel > 1:
            raise HandlerLoadError(
                "model-config.yaml: tensor_parallel makes ranks, and engine: vllm makes processes of its "
                "own. "
                "Take tensor_parallel away, and give engine: arguments: {tensor_parallel_size}, with as many "
                "num_gpus."
            )
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise HandlerLoadError(
                f"model-config.yaml: engine: vllm is not installed where the model runs ({error}). Name vllm "
                "in "
                "the archive's requirements.txt and set useVenv: true, because it brings a torch of its own; "
                "or "
                "take engine: {name: transformers}."
            ) from error
        arguments = engine_arguments(folder, options.get("arguments") or {}, device.get_budget())
        if "prefix_caching" in options:
            arguments.setdefault("enable_prefix_caching", read_prefix_caching(options))
        adapter_options = AdapterOptions.read(options, folder)
        if "max_adapters" in options:
            arguments.setdefault("enable_lora", True)
            arguments.setdefault("max_loras", adapter_options.max_adapters)
            arguments.setdefault("max_lora_rank", adapter_options.max_adapter_rank)
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        config = engine.model_config
        has_adapters = bool(arguments.get("enable_lora"))
        return cls(
            engine, config.max_model_len, config.get_vocab_size(), adapter_options if has_adapters else None
        )

    @property
    def adapters(self) -> Sequence[str]:
        return tuple(self._adapters)

    async def load_adapter(self, name: str, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        options = self._adapter_options
        if options is None:
            raise HandlerLoadError(
                "vLLM was started without adapters: set engine: {max_adapters: 8} in model-config.yaml"
            )
        if name not in self._adapters:
            options.check_count(self._adapters)
        options.check_base(read_config(folder).base_model_name_or_path)
        self._last_adapter_id += 1
        # vLLM distinguishes cached prefixes by the name, so another adapter of a name needs another one.
        unique_name = f"{name}-{self._last_adapter_id}"
        request = LoRARequest(unique_name, self._last_adapter_id, str(folder))
        try:
            await self._engine.add_lora(request)
        except Exception as error:  # vLLM's own error classes are not RuntimeErrors
            raise HandlerLoadError(f"vLLM does not load it: {error}") from error
        replaced, self._adapters[name] = self._adapters.get(name), request
        if replaced is not None:
            await self._engine.remove_lora(replaced.lora_int_id)

    async def unload_adapter(self, name: str) -> None:
        request = self._adapters.pop(name, None)
        if request is not None:  # vLLM loads it again for requests that are under way
            await self._engine.remove_lora(request.lora_int_id)

    @property
    def cache_usage(self) -> float | None:
        return None  # vLLM reports it in its own metrics only

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        validate_request(request, self.vocab_size, self.capacity)
        adapter = None
        if request.adapter is not None and (adapter := self._adapters.get(request.adapter)) is None:
            raise unknown_adapter(request.adapter, self._adapters)
        sampling = request.sampling
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        try:
            params = SamplingParams(
                temperature=0.0 if sampling.is_greedy else sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=sampling.seed,
                logprobs=sampling.logprobs,
                prompt_logprobs=request.prompt_logprobs,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                repetition_penalty=sampling.repetition_penalty,
                logit_bias=dict(sampling.logit_bias) or None,
                structured_outputs=_convert_structured_output(sampling.structured_output),
                max_tokens=max(1, request.max_new_tokens),
                stop_token_ids=list(request.stop_token_ids),
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            options = {} if adapter is None else {"lora_request": adapter}
            generated = self._engine.generate(prompt, params, request.id, **options)
            async with contextlib.aclosing(generated) as outputs:
                async for output in outputs:
                    completion = output.outputs[0]
                    scored = _convert_prompt_logprobs(request, output.prompt_logprobs)
                    if not request.max_new_tokens:  # vLLM generates one token at least
                        yield GenerationChunk([], "length", (), output.num_cached_tokens, scored)
                        return
                    yield GenerationChunk(
                        list(completion.token_ids),
                        completion.finish_reason,
                        _convert_logprobs(completion, sampling.logprobs),
                        output.num_cached_tokens,
                        scored,
                    )
        except Exception as error:  # vLLM's own error classes are not RuntimeErrors
            if self._engine.errored:
                raise PredictionException(
                    f"vLLM's engine has failed: {error}. Send the request again.", 503
                ) from error
            if isinstance(error, ValueError):
                raise PredictionException(f"vLLM refuses the request: {error}", 400) from error
            raise

    async def abort(self, id: str) -> None:
        await self._engine.abort(id)

    async def check_health(self) -> None:
        try:
            await self._engine.check_health()
        except Exception as error:
            raise RuntimeError(f"vLLM's engine has failed: {error}") from error

    async def shutdown(self) -> None:
        self._engine.shutdown()


def engine_arguments(folder: Path, arguments: Any, budget: GpuBudget | None) -> dict[str, Any]:
    """Return vLLM's arguments: those of model-config.yaml, with the model and the limit on a shared GPU.

    vLLM allocates in processes of its own, so ``gpu_memory_utilization`` is its only limit.
    """
    if not isinstance(arguments, Mapping):
        raise HandlerLoadError(f"model-config.yaml: engine.arguments is {arguments!r}; it is a mapping.")
    made = {**arguments, "model": str(folder)}
    if budget is None:
        return made
    requested = made.setdefault("gpu_memory_utilization", budget.fraction)
    if not isinstance(requested, (int, float)) or requested > budget.fraction:
        raise HandlerLoadError(
            f"model-config.yaml: engine.arguments.gpu_memory_utilization is {requested!r}, and num_gpus: "
            f"{budget.share:g} allows {budget.fraction:g} of the GPU. Take it out, or raise num_gpus."
        )
    return made


def _convert_structured_output(output: StructuredOutput | None) -> Any:
    """Return vLLM's StructuredOutputsParams."""
    if output is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    if output.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    value = json.loads(output.value) if output.kind == "choice" else output.value
    return StructuredOutputsParams(**{output.kind: value})


def _convert_logprobs(completion: Any, count: int | None) -> list[Logprob]:
    """Convert vLLM's log-probabilities: its mappings hold the token beside the most likely ones."""
    if count is None:
        return []
    return [
        _convert_logprob(token, candidates, count)
        for token, candidates in zip(completion.token_ids, completion.logprobs)
    ]


def _convert_prompt_logprobs(request: GenerationRequest, logprobs: Any) -> list[Logprob]:
    """Convert those of a prompt, whose first token has none. vLLM sends them once."""
    if request.prompt_logprobs is None or not logprobs:
        return []
    return [
        _convert_logprob(token, candidates, request.prompt_logprobs)
        for token, candidates in zip(request.prompt, logprobs)
    ]


def _convert_logprob(token: int, candidates: Mapping[int, Any] | None, count: int) -> Logprob:
    if candidates is None:
        return Logprob(token, None)
    ordered = sorted(candidates.items(), key=lambda item: -item[1].logprob)[:count]
    return Logprob(token, candidates[token].logprob, tuple((each, entry.logprob) for each, entry in ordered))
