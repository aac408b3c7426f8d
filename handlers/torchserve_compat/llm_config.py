"""Translation of the model-config.yaml of TorchServe's vLLM and TensorRT-LLM handlers to that of ``llm``.

Pure functions: the server calls them at the registration, which decides about ranks and GPUs, and the handler
where no server has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handlers import extras
from handlers.engines import did_you_mean
from handlers.errors import HandlerLoadError

_PAGE = 256  # tokens; flash attention needs a multiple of it
_MAX_PAGES = 128  # of a translated cache, as many tokens as of the default one
_RENAMED_COUNTS = {
    "max_num_batched_tokens": "max_batch_tokens",
    "max_loras": "max_adapters",
    "max_lora_rank": "max_adapter_rank",
}
_DTYPES = {"auto": "auto", "half": "float16", "float": "float32"}

# Keys of vllm_engine_config that change results -> the values without an effect, and the replacement.
_UNSERVED_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "config_format": (("auto", "hf"), "save the model as a Hugging Face folder"),
    "hf_overrides": ((None, {}), "write the values into the folder's config.json"),
    "kv_cache_dtype": (("auto",), "the cache has the model's format: set dtype"),
    "limit_mm_per_prompt": ((None, {}), "llm reads texts only"),
    "load_format": (("auto", "safetensors"), "save the weights as safetensors"),
    "model_loader_extra_config": ((None, {}), "save the weights as safetensors"),
    "num_speculative_tokens": ((None,), "llm has no speculative decoding"),
    "pipeline_parallel_size": ((1, None), "set tensor_parallel_size, or take the handler causal_lm"),
    "quantization": ((None,), "save the weights unquantized, or install vllm"),
    "rope_scaling": ((None, {}), "write it into the folder's config.json"),
    "rope_theta": ((None,), "write it into the folder's config.json"),
    "speculative_config": ((None,), "llm has no speculative decoding"),
    "speculative_model": ((None,), "llm has no speculative decoding"),
    "task": (("auto", "generate", None), "the handler huggingface serves other tasks"),
    "tokenizer": ((None,), "put the tokenizer into the model's folder"),
    "trust_remote_code": ((False, None), "llm runs no code of a model's folder: convert it, or install vllm"),
}
# Keys that change speed, memory or logs, or that a request has instead -> the replacement.
_TUNING_KEYS: dict[str, str] = {
    "block_size": "set engine: page_size",
    "disable_log_requests": "set log_level",
    "disable_log_stats": "GET /metrics has the figures",
    "distributed_executor_backend": "ranks are processes of Ray",
    "enable_chunked_prefill": "engine: max_batch_tokens splits long prompts",
    "enable_prefix_caching": "see the keys of engine",
    "enforce_eager": "remove it",
    "gpu_memory_utilization": "num_gpus below 1 limits the memory of a GPU",
    "guided_decoding_backend": "llguidance compiles formats",
    "max_cpu_loras": "set engine: max_adapters",
    "max_logprobs": "remove it: OpenAI's limits apply",
    "max_num_seqs": "engine: num_blocks limits the tokens of all requests",
    "max_seq_len_to_capture": "remove it",
    "num_scheduler_steps": "remove it",
    "seed": "send seed with a request",
    "swap_space": "remove it",
    "tokenizer_mode": "remove it",
    "use_v2_block_manager": "remove it",
    "worker_use_ray": "ranks are processes of Ray",
}
_TRANSLATED_KEYS = {
    *("model", "max_model_len", "dtype", "tensor_parallel_size", "max_num_batched_tokens", "enable_lora"),
    *("max_loras", "max_lora_rank", "served_model_name", "download_dir", "revision", "tokenizer_revision"),
}
_HANDLER_KEYS = ("model_path", "vllm_engine_config", "adapters", "chat_template")
_TRT_KEYS = ("tokenizer_dir", "engine_dir", "kv_cache_config")


@dataclass(frozen=True)
class TranslatedModelConfig:
    """A model-config.yaml with the keys of ``llm``, and sentences about what was replaced.

    ``model_path`` is a folder of the archive or elsewhere, or a name of the Hugging Face Hub.
    """

    config: dict[str, Any]
    model_path: str
    warnings: tuple[str, ...] = ()


def translate(
    handler: str, config: Mapping[str, Any], directory: Path, has_vllm: bool
) -> TranslatedModelConfig:
    """Return the translated configuration of an archive in ``directory``.

    ``handler`` is ``vllm_handler`` or ``trt_llm_handler``. Keys of ``llm`` that the file has itself take
    precedence. Raises HandlerLoadError for a key that cannot be translated, with its replacement.
    """
    handler_config = config.get("handler") or {}
    if not isinstance(handler_config, Mapping):
        raise HandlerLoadError(f"model-config.yaml: handler is {handler_config!r}; it is a mapping.")
    if handler == "vllm_handler":
        return _translate_vllm(config, handler_config, has_vllm)
    return _translate_trt_llm(config, handler_config, directory, has_vllm)


def _translate_vllm(
    config: Mapping[str, Any], handler_config: Mapping[str, Any], has_vllm: bool
) -> TranslatedModelConfig:
    arguments = dict(_read_mapping(handler_config, "vllm_engine_config"))
    model_path = _model_path(handler_config, arguments)
    warnings = [
        f"handler: {key!r} is not known and has no effect.{did_you_mean(key, _HANDLER_KEYS)}"
        for key in handler_config
        if key not in _HANDLER_KEYS
    ]
    adapters = dict(_read_mapping(handler_config, "adapters"))
    ranks = _read_count(arguments, "tensor_parallel_size")
    if has_vllm:
        removed = ("model", "served_model_name", "download_dir", "revision")
        engine: dict[str, Any] = {"name": "vllm"}
        engine["arguments"] = {key: value for key, value in arguments.items() if key not in removed}
        made: dict[str, Any] = {"num_gpus": ranks or _read_count(config, "parallelLevel") or 1}
    else:
        warnings.append(
            "vLLM is not installed: the engine transformers of the handler llm serves this model. With vLLM "
            "in requirements.txt and useVenv: true, vLLM does."
        )
        engine = {"name": "transformers", **_translate_arguments(arguments, warnings)}
        made = {"tensor_parallel": ranks} if ranks and ranks > 1 else {}
    if adapters:
        engine["adapters"] = adapters
    return TranslatedModelConfig(_merge(config, {**made, "engine": engine}), model_path, tuple(warnings))


def _model_path(handler_config: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    path = arguments.get("model") or handler_config.get("model_path")
    if not isinstance(path, str) or not path:
        raise HandlerLoadError(
            "model-config.yaml: neither handler: model_path nor vllm_engine_config: model names the model: "
            "give a folder of the archive, or a name of the Hugging Face Hub."
        )
    return path


def _translate_arguments(arguments: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Return the options of the engine ``transformers`` for vLLM's arguments."""
    for key, value in arguments.items():
        if key in _UNSERVED_KEYS:
            neutral, replacement = _UNSERVED_KEYS[key]
            if value not in neutral:
                raise HandlerLoadError(
                    f"model-config.yaml: vllm_engine_config: {key}: {value!r} needs vLLM: {replacement}."
                )
        elif key in _TUNING_KEYS:
            if key != "max_num_seqs" or not arguments.get("max_model_len"):
                warnings.append(f"vllm_engine_config: {key} has no effect: {_TUNING_KEYS[key]}.")
        elif key not in _TRANSLATED_KEYS:
            known = (*_TRANSLATED_KEYS, *_TUNING_KEYS, *_UNSERVED_KEYS)
            raise HandlerLoadError(
                f"model-config.yaml: vllm_engine_config: {key!r} is not known, and may change results: "
                f"remove it, or install vllm.{did_you_mean(key, sorted(known))}"
            )
    options = _cache_options(_read_count(arguments, "max_model_len"), _read_count(arguments, "max_num_seqs"))
    if (dtype := arguments.get("dtype")) is not None:
        options["dtype"] = _DTYPES.get(str(dtype), str(dtype))
    for key, name in _RENAMED_COUNTS.items():
        if (count := _read_count(arguments, key)) is not None:
            options[name] = count
    return options


def _cache_options(length: int | None, concurrency: int | None) -> dict[str, Any]:
    """Return the cache for ``concurrency`` requests of ``length`` tokens; without both the default one."""
    if length is None or concurrency is None:
        return {}
    pages = math.ceil(length / _PAGE)
    return {"page_size": _PAGE, "num_blocks": max(pages, min(concurrency * pages, _MAX_PAGES))}


def _translate_trt_llm(
    config: Mapping[str, Any], handler_config: Mapping[str, Any], directory: Path, has_vllm: bool
) -> TranslatedModelConfig:
    warnings = [
        f"handler: {key!r} is not known and has no effect.{did_you_mean(key, _TRT_KEYS)}"
        for key in handler_config
        if key not in _TRT_KEYS
    ]
    cache = dict(_read_mapping(handler_config, "kv_cache_config"))
    paths = [handler_config.get(key) for key in ("tokenizer_dir", "engine_dir")]
    tokenizer_dir, engine_dir = paths
    if not isinstance(tokenizer_dir, str) or not isinstance(engine_dir, str):
        raise HandlerLoadError("model-config.yaml: handler needs tokenizer_dir and engine_dir, two folders.")
    if extras.is_installed("tensorrt_llm"):
        engine: dict[str, Any] = {"name": "tensorrt_llm", "kv_cache_config": cache}
        if engine_dir != tokenizer_dir:  # else the model's own folder is read
            engine["engine_dir"] = engine_dir
        return TranslatedModelConfig(_merge(config, {"num_gpus": 1, "engine": engine}), tokenizer_dir)
    folder = directory / tokenizer_dir
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise HandlerLoadError(
            "model-config.yaml: trt_llm_handler needs tensorrt_llm, which is not installed where the model "
            "runs, and its tokenizer_dir has no model that llm could serve instead. Install it (pip install "
            "tensorrt_llm --extra-index-url https://pypi.nvidia.com), or put the model's config.json and "
            "safetensors into tokenizer_dir."
        )
    name = "vllm" if has_vllm else "transformers"
    warnings.append(
        f"tensorrt_llm is not installed: the engine {name} of the handler llm serves the model in "
        f"{tokenizer_dir}, and not the compiled one in {engine_dir}."
    )
    if cache:
        replacement = "num_gpus below 1 limits the memory of a GPU, and engine: num_blocks the cache"
        warnings.append(f"kv_cache_config has no effect: {replacement}.")
    made: dict[str, Any] = {"engine": {"name": name}, **({"num_gpus": 1} if has_vllm else {})}
    return TranslatedModelConfig(_merge(config, made), tokenizer_dir, tuple(warnings))


def _merge(config: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the keys of ``made`` that it lacks, also inside of ``engine``."""
    own = config.get("engine")
    engine = {**made["engine"], **own} if isinstance(own, Mapping) else own or made["engine"]
    return {**made, **config, "engine": engine}


def _read_mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise HandlerLoadError(f"model-config.yaml: handler: {key} is {value!r}; it is a mapping.")
    return value


def _read_count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise HandlerLoadError(f"model-config.yaml: {key} is {value!r}; it is a whole number from 1.")
    return value
