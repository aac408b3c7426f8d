"""An adapter of TensorRT-LLM's engine, which needs an NVIDIA GPU and the package tensorrt_llm."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from handlers.engines.engine import GenerationChunk, GenerationRequest, SamplingParams, validate_request
from handlers.errors import HandlerLoadError, PredictionException

_CONFIG = "config.json"


class TensorRTLLM:
    """An engine that runs TensorRT-LLM's ``LLM``.

    The options are ``engine_dir``, a compiled engine (without it, the model's own folder is read),
    ``kv_cache_config``, the fields of KvCacheConfig, and ``arguments``, further ones of ``LLM``.
    """

    OPTIONS = ("engine_dir", "kv_cache_config", "arguments")
    adapters: tuple[str, ...] = ()

    def __init__(self, llm: Any, capacity: int, vocab_size: int) -> None:
        self.capacity = capacity
        self.vocab_size = vocab_size
        self._llm = llm
        self._running: dict[str, Any] = {}
        self._failure: str | None = None

    @classmethod
    async def start(
        cls, folder: Path, gpu_id: int | None, options: Mapping[str, Any], tensor_parallel: int = 1
    ) -> TensorRTLLM:
        """Load the engine on the replica's GPU."""
        if tensor_parallel > 1:
            raise HandlerLoadError(
                "model-config.yaml: tensor_parallel makes ranks, and TensorRT-LLM makes processes of its "
                "own. Take it away, and give engine: arguments: {tensor_parallel_size}, with as many "
                "num_gpus."
            )
        try:
            from tensorrt_llm.llmapi import KvCacheConfig
        except ImportError as error:
            raise HandlerLoadError(
                f"model-config.yaml: engine: tensorrt_llm is not installed where the model runs ({error}): "
                "pip install tensorrt_llm --extra-index-url https://pypi.nvidia.com, or take engine: "
                "{name: transformers}."
            ) from error
        model = Path(options.get("engine_dir") or folder)
        capacity, vocab_size = _read_limits(model, folder)
        llm = _find_class(model)(
            model=str(model),
            skip_tokenizer_init=True,
            kv_cache_config=KvCacheConfig(**(options.get("kv_cache_config") or {})),
            **(options.get("arguments") or {}),
        )
        return cls(llm, capacity, vocab_size)

    @property
    def cache_usage(self) -> float | None:
        return None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        validate_request(request, self.vocab_size, self.capacity)
        sent = 0
        finished = False
        try:
            params = _convert_sampling(request)
            output = self._llm.generate_async(
                {"prompt_token_ids": list(request.prompt)}, sampling_params=params, streaming=True
            )
            self._running[request.id] = output
            async for result in output:
                completion = result.outputs[0]
                tokens = list(completion.token_ids)[sent:]
                sent += len(tokens)
                reason = completion.finish_reason
                finished = reason is not None
                yield GenerationChunk(tokens, "abort" if reason in ("cancelled", "timeout") else reason)
            if not finished:  # it was aborted
                yield GenerationChunk([], "abort")
        except ValueError as error:
            raise PredictionException(f"TensorRT-LLM refuses the request: {error}", 400) from error
        except RuntimeError as error:
            self._failure = str(error)
            raise PredictionException(
                f"TensorRT-LLM's engine has failed: {error}. Send the request again.", 503
            ) from error
        finally:
            output = self._running.pop(request.id, None)
            if output is not None and not finished:
                output.abort()

    async def abort(self, id: str) -> None:
        output = self._running.get(id)
        if output is not None:
            output.abort()

    async def check_health(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"TensorRT-LLM's engine has failed: {self._failure}")

    async def shutdown(self) -> None:
        self._llm.shutdown()

    async def load_adapter(self, name: str, folder: Path) -> None:
        raise HandlerLoadError("engine: tensorrt_llm has no adapters: take transformers or vllm.")

    async def unload_adapter(self, name: str) -> None:
        pass


def _find_class(model: Path) -> Any:
    """Return TensorRT-LLM's class for a folder: since 1.0, compiled engines have one of their own."""
    import tensorrt_llm

    if "build_config" in _read_config(model):
        try:
            from tensorrt_llm._tensorrt_engine import LLM
        except ImportError:
            return tensorrt_llm.LLM
        return LLM
    return tensorrt_llm.LLM


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise HandlerLoadError(
            f"{folder}: {_CONFIG} cannot be read ({error}): trtllm-build and save_pretrained write one."
        ) from None
    return config if isinstance(config, dict) else {}


def _read_limits(model: Path, folder: Path) -> tuple[int, int]:
    """Return the most tokens of a request, and the size of the vocabulary."""
    config = _read_config(model)
    build, pretrained = config.get("build_config") or {}, config.get("pretrained_config") or config
    capacity = build.get("max_seq_len") or pretrained.get("max_position_embeddings")
    vocab_size = pretrained.get("vocab_size")
    if not isinstance(capacity, int) or not isinstance(vocab_size, int):
        raise HandlerLoadError(f"{model / _CONFIG}: it has no max_seq_len and vocab_size.")
    return capacity, vocab_size


def _convert_sampling(request: GenerationRequest) -> Any:
    """Return TensorRT-LLM's SamplingParams. Raises PredictionException 400 for what it cannot do here."""
    from tensorrt_llm import SamplingParams as TensorRTParams

    sampling = request.sampling
    _check_features(sampling)
    options: dict[str, Any] = {"top_k": 1}
    if not sampling.is_greedy:
        options = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            # TensorRT-LLM's default is a constant.
            "seed": secrets.randbits(63) if sampling.seed is None else sampling.seed % 2**64,
        }
    ends = list(request.stop_token_ids)
    return TensorRTParams(
        **options,
        end_id=ends[0] if ends else -1,
        pad_id=ends[0] if ends else 0,
        stop_token_ids=ends[1:] or None,
        max_tokens=request.max_new_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        detokenize=False,
    )


def _check_features(sampling: SamplingParams) -> None:
    unserved = {
        "logprobs": sampling.logprobs,
        "logit_bias": sampling.logit_bias,
        "structured output": sampling.structured_output,
    }
    for name, value in unserved.items():
        if value:
            raise PredictionException(f"engine: tensorrt_llm does not serve {name} here: leave it out.", 400)
