"""The built-in handler ``llm``: text generation for many requests at once, whole or streamed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from handlers import engines, ignored_fields, json_text
from handlers.builtin.llm_adapters import LoadedAdapters, select_adapter
from handlers.builtin.llm_request import PARAMETERS, ParsedRequest, parse_request
from handlers.builtin.vertex_instance import VertexInstance, find_instance
from handlers.distributed.degrees import degrees, layout
from handlers.engines import openai, openai_response, tool_calls
from handlers.engines.adapter_files import AdapterOptions
from handlers.engines.detokenizer import Detokenizer
from handlers.engines.engine import Engine, GenerationRequest, Logprob, SamplingParams
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain.unsupported import refuse_explanations
from handlers.ignored_fields import format_ignored

_MAX_INLINE_CHARACTERS = 8192  # of a prompt; the tokens of longer ones take more than some milliseconds
_DEFAULT_NEW_TOKENS = 256  # where neither the request nor the configuration has max_new_tokens


@dataclass(frozen=True)
class GenerationResult:
    """The result of a request; ``prompt_tokens``, ``cached_tokens`` and ``new_tokens`` are counts.

    ``ids`` are the generated tokens without the one that ends the text. ``rest`` and ``logprobs`` are the
    part that was not streamed.
    """

    ids: Sequence[int]
    text: str
    rest: str
    logprobs: Sequence[Logprob]
    prompt_tokens: int
    cached_tokens: int | None  # of the prompt; None where the engine does not report it
    new_tokens: int
    finish_reason: str | None
    stop: str | None = None  # the stop string that ended the text


class LanguageModel:
    """A handler of a Hugging Face folder of a causal language model, with the configured engine.

    A row is a text, or JSON ``{"prompt", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop",
    "stream", "adapter"}``. The response is ``{"text", "usage", "finish_reason"}``; with ``stream``, chunks of
    the text. With the header ``url_path``, a row is a body of OpenAI's API (``openai.py``). The folder is the
    archive itself, or the folder that its ``serializedFile`` names.
    """

    takes_parameters = True  # of a request, beside its inputs
    instance_defaults: ClassVar[Mapping[str, Any]] = {}  # of instances behind the envelope vertex

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.adapters: LoadedAdapters | None = None
        self.tokenizer: Any = None
        self.max_new_tokens: int | None = None
        self.default_sampling = SamplingParams()
        self.end_tokens: tuple[int, ...] = ()
        # One thread, so that long prompts take one core at most from the generation loop.
        self._tokenizer_thread = ThreadPoolExecutor(1, "tokenizer")

    async def initialize(self, context: Any) -> None:
        from transformers import AutoTokenizer

        folder = find_model_folder(context)
        options = context.model_yaml_config.get("engine") or {}
        if not isinstance(options, Mapping):
            raise HandlerLoadError(f"model-config.yaml: engine is {options!r}; it is {{name: transformers}}.")
        options = dict(options)
        _check_remote_code(
            options, bool(context.manifest) or context.model_yaml_config.get("trusted") is True
        )
        limit = self.max_new_tokens = options.pop("max_new_tokens", None)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise HandlerLoadError(f"model-config.yaml: engine.max_new_tokens is {limit!r}; it is 1 or more.")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, OSError, KeyError) as error:
            raise HandlerLoadError(f"{folder}: there is no tokenizer in it: {error}") from error
        self.default_sampling, self.end_tokens = _read_generation_config(folder, self.tokenizer)
        tensor, pipeline = degrees(context.model_yaml_config)
        if pipeline > 1:
            raise HandlerLoadError(
                "model-config.yaml: llm generates for many requests at once, which a pipeline of layers "
                "cannot. Take tensor_parallel, or the handler causal_lm."
            )
        if placement_options := layout(context.model_yaml_config):
            raise HandlerLoadError(
                f"model-config.yaml: llm keeps its whole model on the device that generates, without "
                f"{next(iter(placement_options))}. Take tensor_parallel, or the handler causal_lm."
            )
        static_adapters = options.pop("adapters", None)
        if isinstance(static_adapters, Mapping) and "max_adapters" not in options:
            options["max_adapters"] = max(AdapterOptions.max_adapters, len(static_adapters))
        self.engine = await engines.start(folder, context.system_properties.get("gpu_id"), options, tensor)
        self.adapters = LoadedAdapters(self.engine)
        await self.adapters.load_static(static_adapters, Path(context.system_properties["model_dir"]))

    async def load_adapter(self, name: str, folder: Awaitable[Path]) -> None:
        """Load a LoRA adapter while requests run; requests for it wait meanwhile.

        Raises HandlerLoadError, with the reason.
        """
        assert self.adapters is not None
        await self.adapters.load(name, folder)

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; those under way finish."""
        assert self.adapters is not None
        await self.adapters.unload(name)

    async def check_health(self) -> None:
        """Raise RuntimeError, with the reason, if this process cannot generate any more."""
        assert self.engine is not None
        await self.engine.check_health()

    async def handle(self, data: list[Any], context: Any) -> list[Any]:
        if context.get_request_header(0, "describe") == "True":
            return [self.describe_handle() for _ in data]
        refuse_explanations("llm", context)
        return list(
            await asyncio.gather(*(self._answer_row(index, row, context) for index, row in enumerate(data)))
        )

    def describe_handle(self) -> dict[str, Any]:
        """Return the parameters of a request and the limits of prompt and output."""
        assert self.engine is not None
        return {
            "input": ["prompt", *PARAMETERS],
            "adapters": list(self.engine.adapters),
            "cache_tokens": self.engine.capacity,
            "max_new_tokens": self.max_new_tokens,
        }

    async def _answer_row(self, index: int, row: Any, context: Any) -> Any:
        path = context.get_request_header(index, "url_path")
        try:
            if path:
                return await self._answer_openai(index, path, row, context)
            if (instance := find_instance(row)) is not None:
                return await self._answer_instance(index, instance, context)
            return await self._answer_text(index, parse_request(row, self.default_sampling), context)
        except PredictionException as error:
            return error

    async def _answer_instance(self, index: int, instance: VertexInstance, context: Any) -> Any:
        """Return the completion of a chat, or the text of an instance of Vertex AI."""
        if instance.is_chat:
            context.set_response_content_type(index, "application/json")  # that of events where it streams
            return await self._answer_openai(index, openai.CHAT, {"body": instance.body}, context)
        parsed = parse_request({"body": instance.body}, self.default_sampling)
        result = await self._generate(index, parsed, context)
        prompt = parsed.prompt if isinstance(parsed.prompt, str) else self._decode(parsed.prompt)
        return instance.format(prompt, result.text)

    async def _answer_text(self, index: int, parsed: ParsedRequest, context: Any) -> Any:
        if parsed.stream:
            context.set_response_content_type(index, "text/plain; charset=utf-8")
            result = await self._generate(index, parsed, context, lambda text, _: context.emit(index, text))
            return result.rest
        result = await self._generate(index, parsed, context)
        return {
            "text": result.text,
            "usage": _count_usage([result.prompt_tokens], [result]),
            "finish_reason": result.finish_reason,
        }

    async def _answer_openai(self, index: int, path: str, row: Any, context: Any) -> Any:
        """Return the response of OpenAI's API; all choices are generated at once."""
        if path == openai.MODELS:
            assert self.engine is not None
            return openai_response.list_models(context.model_name, self.engine.adapters)
        if path == openai.TOKENIZE:
            return await self._count_tokens(openai.parse_tokenize(row, self.default_sampling))
        request = openai.parse_request(path, row, self.default_sampling)
        openai.check_output_size(request, self.max_new_tokens or _DEFAULT_NEW_TOKENS)
        if request.ignored:
            context.set_response_header(index, ignored_fields.HEADER, format_ignored(request.ignored))
        adapter = select_adapter(context, index, request.model)
        response = openai_response.CompletionResponse(request, context.model_name, self._decode)
        prompts = await self._encode_prompts(request)
        openai.check_prompt_logprobs(request, prompts)
        if request.stream:
            context.set_response_content_type(index, openai.EVENT_STREAM)

        calls: dict[int, list[Any]] = {}

        async def generate_choice(number: int) -> GenerationResult:
            prompt = prompts[number // request.n]
            sampling, is_echo_due = request.sampling, request.echo
            if sampling.seed is not None:
                sampling = replace(sampling, seed=sampling.seed + number % request.n)
            limits = request.max_new_tokens, sampling, request.stops, request.stream
            parsed = ParsedRequest(prompt, *limits, adapter, request.prompt_logprobs)

            def take_echo() -> str:  # after the engine has accepted the prompt's tokens
                nonlocal is_echo_due
                echo = self._decode(prompt) if is_echo_due else ""
                is_echo_due = False
                return echo

            def send(text: str, logprobs: Sequence[Logprob]) -> None:
                context.emit(index, response.text_event(number, take_echo() + text, logprobs))

            # A tool call is recognized once it is complete, so with tools no text is streamed.
            should_stream = request.stream and not request.tools
            result = await self._generate(index, parsed, context, send if should_stream else None)
            if result.finish_reason == "abort":
                raise PredictionException("The model is being unloaded: send the request again.", 503)
            if request.tools:
                text, calls[number] = self._parse_tool_calls(prompt, result, request)
                result = replace(result, text=text, rest=text)
            else:
                echo = take_echo()
                result = replace(result, text=echo + result.text, rest=echo + result.rest)
            if request.stream:
                reasons = result.finish_reason, calls.get(number, ()), result.stop
                events = response.finish_events(number, result.rest, result.logprobs, *reasons)
                context.emit(index, events)
            return result

        tasks = [asyncio.ensure_future(generate_choice(number)) for number in range(len(prompts) * request.n)]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        usage = _count_usage(map(len, prompts), results, request.n)
        if request.stream:
            return response.done_events(usage)
        choices = [
            response.build_choice(
                i, result.text, result.logprobs, result.finish_reason, calls.get(i, ()), result.stop
            )
            for i, result in enumerate(results)
        ]
        return response.build(choices, usage)

    async def _count_tokens(self, request: openai.CompletionRequest) -> dict[str, Any]:
        """Return the tokens of a prompt, as vLLM does."""
        assert self.engine is not None
        [tokens] = await self._encode_prompts(request)
        return {"count": len(tokens), "max_model_len": self.engine.capacity, "tokens": tokens}

    async def _encode_prompts(self, request: openai.CompletionRequest) -> list[list[int]]:
        if request.chat:
            return [await self._encode_chat(request)]
        return [await self._encode(prompt) for prompt in request.prompts]

    async def _encode_chat(self, request: openai.CompletionRequest) -> list[int]:
        """Return the messages as tokens, formatted by the model's chat template."""
        length = len(str(request.messages)) + len(str(request.tools))
        return await self._tokenize(length, self._apply_chat_template, request)

    def _apply_chat_template(self, request: openai.CompletionRequest) -> list[int]:
        from jinja2.exceptions import TemplateError

        if not self.tokenizer.chat_template:
            hint = f"archive a tokenizer with one, or use {openai.COMPLETIONS}"
            raise PredictionException(f"This model's tokenizer has no chat template: {hint}.", 400)
        if request.tools and not request.forced_call and tool_calls.find_format(self.tokenizer) is None:
            raise PredictionException(
                "tools: this model has no format for tool calls. Set transformers' response_template in "
                'tokenizer_config.json, or force a call by "tool_choice": "required".',
                400,
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(request.messages),
                tools=list(request.tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **request.template_variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise PredictionException(
                f"The model's chat template does not take these messages: {error}", 400
            ) from None
        return self.tokenizer.encode(json_text.check_text(text), add_special_tokens=False)

    def _parse_tool_calls(
        self, prompt: list[int], result: GenerationResult, request: openai.CompletionRequest
    ) -> tuple[str, list[Any]]:
        """Return the text and the tool calls of a result; an incomplete call is returned as text."""
        if request.forced_call is not None:
            calls = tool_calls.parse_forced(result.text, request.forced_call)
            return "" if calls else result.text, calls
        output = result.text if request.stops else list(result.ids)
        text, calls = tool_calls.parse_text(self.tokenizer, prompt, output, request.tools)
        return result.text if text is None else text, calls

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await self._tokenize(len(prompt), self.tokenizer.encode, json_text.check_text(prompt))

    async def _tokenize(self, length: int, function: Callable[..., list[int]], *args: Any) -> list[int]:
        """Call ``function``, in another thread for a long text: the event loop serves all streams."""
        if length <= _MAX_INLINE_CHARACTERS:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, function, *args)

    async def _generate(
        self,
        index: int,
        parsed: ParsedRequest,
        context: Any,
        send: Callable[[str, Sequence[Logprob]], None] | None = None,
    ) -> GenerationResult:
        """Generate a text; ``send`` is called with each chunk of it except the last."""
        assert self.engine is not None and self.adapters is not None
        if parsed.adapter is not None:
            await self.adapters.wait_for(parsed.adapter)
        prompt = await self._encode(parsed.prompt)
        count = parsed.max_new_tokens
        if count is None:  # a default may be reduced to the remaining capacity
            count = max(
                1, min(self.max_new_tokens or _DEFAULT_NEW_TOKENS, self.engine.capacity - len(prompt))
            )
        salt = context.get_request_header(index, "cache_salt")  # of the server, by the key's owner
        salt = salt if isinstance(salt, str) else ""
        options = parsed.sampling, self.end_tokens, salt, parsed.adapter, parsed.prompt_logprobs
        request = GenerationRequest(f"{uuid.uuid4()}", prompt, count, *options)
        detokenizer = Detokenizer(self._decode, parsed.stops)
        timings = _RequestTimings(context, index, self.engine)
        finish_reason: str | None = None
        cached_tokens: int | None = None
        logprobs: list[Logprob] = []
        ids: list[int] = []
        chunks = self.engine.generate(request)
        try:
            async for chunk in chunks:
                timings.record_tokens(len(chunk.tokens))
                cached_tokens = chunk.cached_tokens
                ids += chunk.tokens
                text = detokenizer.push(chunk.tokens)
                logprobs += chunk.prompt_logprobs
                logprobs += [logprob for logprob in chunk.logprobs if logprob.token not in self.end_tokens]
                if send is not None and text:
                    send(text, logprobs)
                    logprobs = []
                finish_reason = "stop" if detokenizer.stopped else chunk.finish_reason
                if finish_reason is not None:
                    break
        finally:
            await chunks.aclose()  # frees the request's cache if it has not finished
        rest = detokenizer.finish()
        timings.finish(len(prompt), cached_tokens)
        if detokenizer.stopped:
            finish_reason = "stop"
        if ids and ids[-1] in self.end_tokens:
            ids = ids[:-1]
        text, count = detokenizer.text, timings.tokens
        counts = len(prompt), cached_tokens, count
        return GenerationResult(ids, text, rest, logprobs, *counts, finish_reason, detokenizer.stop)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _count_usage(
    prompt_lengths: Iterable[int], results: Sequence[GenerationResult], choices: int = 1
) -> dict[str, Any]:
    """Return the token counts of a response with so many ``choices`` of each prompt."""
    prompt_tokens, new_tokens = sum(prompt_lengths), sum(result.new_tokens for result in results)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
    cached = [result.cached_tokens for result in results[::choices] if result.cached_tokens is not None]
    if cached:
        usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    return usage


class _RequestTimings:
    """A recorder of one request's tokens and times as metrics of the model."""

    def __init__(self, context: Any, index: int, engine: Engine) -> None:
        self.tokens = 0
        self._metrics = context.metrics
        self._index = index
        self._engine = engine
        self._started_at = time.perf_counter()
        self._first_token_at: float | None = None

    def record_tokens(self, tokens: int) -> None:
        if tokens and self._first_token_at is None:
            self._first_token_at = time.perf_counter()
            if self._metrics is not None:
                elapsed_ms = round((self._first_token_at - self._started_at) * 1000, 2)
                self._metrics.add_time("TimeToFirstToken", elapsed_ms, self._index)
                if self._engine.cache_usage is not None:
                    percent = round(100 * self._engine.cache_usage, 2)
                    self._metrics.add_percent("CacheUse", percent, self._index)
        self.tokens += tokens

    def finish(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        if self._metrics is None:
            return
        if cached_tokens is not None:
            self._metrics.add_counter("PrefixCacheQueries", prompt_tokens, self._index)
            self._metrics.add_counter("PrefixCacheHits", cached_tokens, self._index)
        self._metrics.add_counter("PromptTokens", prompt_tokens, self._index)
        self._metrics.add_counter("GeneratedTokens", self.tokens, self._index)
        seconds = time.perf_counter() - (self._first_token_at or self._started_at)
        if self.tokens > 1 and seconds > 0:
            from handlers.metrics import MetricTypes

            rate = round((self.tokens - 1) / seconds, 2)  # the first token took the prompt's time
            self._metrics.add_metric("TokensPerSecond", rate, "tokens", self._index, (), MetricTypes.GAUGE)


def find_model_folder(context: Any) -> Path:
    """Return the folder of the model's ``config.json``.

    It is the folder or file that ``serializedFile`` names, the folder of that file, or the archive itself.
    """
    root = Path(context.system_properties["model_dir"])
    serialized_file = ((context.manifest or {}).get("model") or {}).get("serializedFile")
    folders = [root / serialized_file, (root / serialized_file).parent, root] if serialized_file else [root]
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    raise HandlerLoadError(
        f"{folders[0]}: there is no config.json: llm serves the folder that a model's and its tokenizer's "
        "save_pretrained write. Archive all of its files."
    )


def _check_remote_code(options: Mapping[str, Any], runs_code: bool) -> None:
    """Raise HandlerLoadError where a file of a model without a manifest allows the model's own code."""
    arguments = options.get("arguments")
    if isinstance(arguments, Mapping) and arguments.get("trust_remote_code") and not runs_code:
        raise HandlerLoadError(
            "model-config.yaml: engine.arguments.trust_remote_code: a model's own file cannot allow its "
            "code; register the model with trusted=true, or name it in store.trusted."
        )


def _read_generation_config(folder: Path, tokenizer: Any) -> tuple[SamplingParams, tuple[int, ...]]:
    """Return the folder's sampling parameters, greedy by default, and the tokens that end a text."""
    from transformers import AutoConfig, GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # without a file, take the values of the model's own configuration
        config = GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        )
    ends = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    ends = () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    values = {"repetition_penalty": config.repetition_penalty}
    if config.do_sample:
        values |= {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
        values["temperature"] = 1.0 if config.temperature is None else config.temperature
    return SamplingParams(**{key: value for key, value in values.items() if value is not None}), ends
