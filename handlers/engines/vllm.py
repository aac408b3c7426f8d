"""vLLM's engine, where it is installed: it wants a GPU and versions of torch of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from handlers.engines.engine import Chunk, GenerationRequest, Logprob, admit
from handlers.errors import HandlerLoadError, PredictionException


class VLLM:
    """vLLM's asynchronous engine. ``arguments`` are its ``AsyncEngineArgs``, as they are."""

    OPTIONS = ("arguments",)

    def __init__(self, engine: Any, capacity: int, vocabulary: int) -> None:
        self.capacity = capacity
        self.vocabulary = vocabulary
        self._engine = engine

    @classmethod
    async def start(
        cls, folder: Path, gpu_id: int | None, options: Mapping[str, Any], tensor_parallel: int = 1
    ) -> VLLM:
        """The engine, its model loaded; the GPU is the one that the replica was given."""
        if tensor_parallel > 1:
            raise HandlerLoadError(
                "model-config.yaml: tensor_parallel makes ranks, and engine: vllm makes processes of its own. Take "
                "tensor_parallel away, and give engine: arguments: {tensor_parallel_size}, with as many num_gpus."
            )
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise HandlerLoadError(
                f"model-config.yaml: engine: vllm is not installed where the model runs ({error}). Name vllm in the "
                "archive's requirements.txt and set useVenv: true, because it brings a torch of its own; or take "
                "engine: {name: transformers}."
            ) from error
        arguments = options.get("arguments") or {}
        if not isinstance(arguments, Mapping):
            raise HandlerLoadError(f"model-config.yaml: engine.arguments is {arguments!r}; it is a mapping.")
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**{**arguments, "model": str(folder)}))
        config = engine.model_config
        return cls(engine, config.max_model_len, config.get_vocab_size())

    @property
    def use(self) -> float | None:
        return None  # vLLM tells it to its own metrics alone

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        admit(request, self.vocabulary, self.capacity)
        sampling = request.sampling
        prompt = {"prompt_token_ids": list(request.prompt)}
        try:
            wanted = SamplingParams(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=sampling.seed,
                logprobs=sampling.logprobs,
                max_tokens=request.max_new_tokens,
                stop_token_ids=list(request.end),
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            async with contextlib.aclosing(self._engine.generate(prompt, wanted, request.id)) as outputs:
                async for output in outputs:
                    piece = output.outputs[0]
                    yield Chunk(list(piece.token_ids), piece.finish_reason, _logprobs(piece, sampling.logprobs))
        except Exception as error:  # of its own kinds, which are no RuntimeErrors
            if self._engine.errored:
                raise PredictionException(f"vLLM's engine has failed: {error}. Send the request again.", 503) from error
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


def _logprobs(piece: Any, count: int | None) -> list[Logprob]:
    """vLLM's own, which hold the token's beside the likeliest ones'."""
    if count is None:
        return []
    told = []
    for token, chances in zip(piece.token_ids, piece.logprobs):
        ordered = sorted(chances.items(), key=lambda chance: -chance[1].logprob)[:count]
        told.append(Logprob(token, chances[token].logprob, tuple((other, one.logprob) for other, one in ordered)))
    return told
