"""The built-in handler ``llm``: text from a language model, whole or in pieces, many requests at once."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from handlers import engines, openai
from handlers.degrees import degrees, layout
from handlers.engines.detokenizer import Detokenizer
from handlers.engines.engine import Engine, GenerationRequest, Logprob, Sampling
from handlers.errors import HandlerLoadError, PredictionException
from handlers.unexplained import refuse_explanations

_NEW_TOKENS = 256  # where neither request nor configuration says how many
_STOPS = 16
_WORDS = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream")
_SYNONYMS = {"inputs": "prompt", "max_tokens": "max_new_tokens"}


@dataclass(frozen=True)
class Wish:
    """A request as it was read: ``prompt`` is a text or a list of token ids; None is what the model decides."""

    prompt: str | list[int]
    max_new_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool


@dataclass(frozen=True)
class Told:
    """What became of a wish: ``prompt`` and ``tokens`` are numbers, ``rest`` and ``logprobs`` what was not said yet.

    ``ids`` are the answer's tokens, without the one that ends it.
    """

    ids: Sequence[int]
    text: str
    rest: str
    logprobs: Sequence[Logprob]
    prompt: int
    tokens: int
    finish_reason: str | None


class LanguageModel:
    """Serves a Hugging Face folder of a causal language model with the engine that model-config.yaml names.

    A row is a text, or JSON ``{"prompt", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop",
    "stream"}``. The answer is ``{"text", "usage", "finish_reason"}``; with ``stream``, the text in pieces as it
    comes. Where the header ``url_path`` says so, a row is a body of OpenAI's API (``openai.py``). The folder is the
    archive itself, or where its ``serializedFile`` lies.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.tokenizer: Any = None
        self.max_new_tokens: int | None = None
        self.default = Sampling()
        self.end: tuple[int, ...] = ()

    async def initialize(self, context: Any) -> None:
        from transformers import AutoTokenizer

        folder = model_folder(context)
        options = context.model_yaml_config.get("engine") or {}
        if not isinstance(options, Mapping):
            raise HandlerLoadError(f"model-config.yaml: engine is {options!r}; it is {{name: transformers}}.")
        options = dict(options)
        self.max_new_tokens = options.pop("max_new_tokens", None)
        if self.max_new_tokens is not None and (type(self.max_new_tokens) is not int or self.max_new_tokens < 1):
            wrong = self.max_new_tokens
            raise HandlerLoadError(f"model-config.yaml: engine.max_new_tokens is {wrong!r}; it is 1 or more.")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (ValueError, OSError, KeyError) as error:
            raise HandlerLoadError(f"{folder}: there is no tokenizer in it: {error}") from error
        self.default, self.end = _generation(folder, self.tokenizer)
        tensor, pipeline = degrees(context.model_yaml_config)
        if pipeline > 1:
            raise HandlerLoadError(
                "model-config.yaml: llm generates for many requests at once, which a pipeline of layers cannot. Take "
                "tensor_parallel, or the handler causal_lm."
            )
        if said := layout(context.model_yaml_config):
            raise HandlerLoadError(
                f"model-config.yaml: llm keeps its whole model on the device that generates, without "
                f"{next(iter(said))}. Take tensor_parallel, or the handler causal_lm."
            )
        self.engine = await engines.start(folder, context.system_properties.get("gpu_id"), options, tensor)

    async def check_health(self) -> None:
        """Raises RuntimeError, with the reason, where this process can generate no more."""
        assert self.engine is not None
        await self.engine.check_health()

    async def handle(self, data: list[Any], context: Any) -> list[Any]:
        if context.get_request_header(0, "describe") == "True":
            return [self.describe_handle() for _ in data]
        refuse_explanations("llm", context)
        return list(await asyncio.gather(*(self._answer(index, row, context) for index, row in enumerate(data))))

    def describe_handle(self) -> dict[str, Any]:
        """What a request may say, and what there is room for."""
        assert self.engine is not None
        return {"input": ["prompt", *_WORDS], "room": self.engine.capacity, "max_new_tokens": self.max_new_tokens}

    async def _answer(self, index: int, row: Any, context: Any) -> Any:
        path = context.get_request_header(index, "url_path")
        try:
            if path:
                return await self._converse(index, path, row, context)
            return await self._generate(index, read(row, self.default), context)
        except PredictionException as error:
            return error

    async def _generate(self, index: int, wish: Wish, context: Any) -> Any:
        if wish.stream:
            context.set_response_content_type(index, "text/plain; charset=utf-8")
            return (await self._tell(index, wish, context, lambda piece, _: context.emit(index, piece))).rest
        told = await self._tell(index, wish, context)
        return {"text": told.text, "usage": _usage([told.prompt], [told]), "finish_reason": told.finish_reason}

    async def _converse(self, index: int, path: str, row: Any, context: Any) -> Any:
        """The answer in OpenAI's API; all choices are generated at once."""
        if path == openai.MODELS:
            return openai.models(context.model_name)
        question = openai.read(path, row, self.default)
        answer = openai.Answer(question, context.model_name, self._decode)
        prompts = [self._chat(question)] if question.chat else [self._encode(prompt) for prompt in question.prompts]
        if question.stream:
            context.set_response_content_type(index, openai.EVENT_STREAM)

        calls: dict[int, list[Any]] = {}

        async def choose(number: int) -> Told:
            prompt = prompts[number // question.n]
            sampling, echo = question.sampling, self._decode(prompt) if question.echo else ""
            if sampling.seed is not None:
                sampling = replace(sampling, seed=sampling.seed + number % question.n)
            wish = Wish(prompt, question.max_new_tokens, sampling, question.stops, question.stream)

            def say(piece: str, logprobs: Sequence[Logprob]) -> None:
                nonlocal echo
                context.emit(index, answer.piece(number, echo + piece, logprobs))
                echo = ""

            # A call of a tool is seen once it is whole, and nothing is said before.
            told = await self._tell(index, wish, context, say if question.stream and not question.tools else None)
            if told.finish_reason == "abort":
                raise PredictionException("The model is being unloaded: send the request again.", 503)
            if question.tools:
                text, calls[number] = self._called(prompt, told, question)
                told = replace(told, text=text, rest=text)
            else:
                told = replace(told, text=echo + told.text, rest=echo + told.rest)
            if question.stream:
                end = answer.end(number, told.rest, told.logprobs, told.finish_reason, calls.get(number, ()))
                context.emit(index, end)
            return told

        choices = [asyncio.ensure_future(choose(number)) for number in range(len(prompts) * question.n)]
        try:
            told = await asyncio.gather(*choices)
        finally:
            for choice in choices:
                choice.cancel()
        usage = _usage(map(len, prompts), told)
        if question.stream:
            return answer.done(usage)
        said = [
            answer.choice(i, one.text, one.logprobs, one.finish_reason, calls.get(i, ())) for i, one in enumerate(told)
        ]
        return answer.whole(said, usage)

    def _chat(self, question: openai.Question) -> list[int]:
        """The messages as the tokens that the model's chat template makes of them."""
        from jinja2.exceptions import TemplateError

        if not self.tokenizer.chat_template:
            cure = f"archive a tokenizer with one, or ask {openai.COMPLETIONS}"
            raise PredictionException(f"This model's tokenizer has no chat template: {cure}.", 400)
        if question.tools and getattr(self.tokenizer, "response_template", None) is None:
            cure = "it is transformers' response_template in tokenizer_config.json"
            raise PredictionException(f"tools: nothing says how a call stands in this model's answers; {cure}.", 400)
        try:
            text = self.tokenizer.apply_chat_template(
                list(question.messages),
                tools=list(question.tools) or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise PredictionException(f"The model's chat template does not take these messages: {error}", 400) from None
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _called(self, prompt: list[int], told: Told, question: openai.Question) -> tuple[str, list[Any]]:
        """What an answer says and the tools that it calls; all of it as text where it is no whole call."""
        said = told.text if question.stops else list(told.ids)
        try:
            parsed = self.tokenizer.parse_response(said, prefix=list(prompt), tools=list(question.tools))
            return openai.called(parsed)
        except (ValueError, KeyError, TypeError):
            return told.text, []

    def _encode(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    async def _tell(
        self, index: int, wish: Wish, context: Any, say: Callable[[str, Sequence[Logprob]], None] | None = None
    ) -> Told:
        """Generate; ``say`` gets each piece of the text as it comes, all but the last."""
        assert self.engine is not None
        prompt = self._encode(wish.prompt)
        count = wish.max_new_tokens
        if count is None:  # nobody asked for a number, so it may be what there is room for
            count = max(1, min(self.max_new_tokens or _NEW_TOKENS, self.engine.capacity - len(prompt)))
        request = GenerationRequest(f"{uuid.uuid4()}", prompt, count, wish.sampling, self.end)
        text = Detokenizer(self._decode, wish.stops)
        times = _Times(context, index, self.engine)
        reason = None
        logprobs: list[Logprob] = []
        ids: list[int] = []
        chunks = self.engine.generate(request)
        try:
            async for chunk in chunks:
                times.came(len(chunk.tokens))
                ids += chunk.tokens
                piece = text.push(chunk.tokens)
                logprobs += [one for one in chunk.logprobs if one.token not in self.end]
                if say is not None and piece:
                    say(piece, logprobs)
                    logprobs = []
                reason = "stop" if text.stopped else chunk.finish_reason
                if reason is not None:
                    break
        finally:
            await chunks.aclose()  # which frees its place where it was not at its end
        rest = text.finish()
        times.ended(len(prompt))
        reason = "stop" if text.stopped else reason
        ended = bool(ids) and ids[-1] in self.end
        return Told(ids[:-1] if ended else ids, text.text, rest, logprobs, len(prompt), times.tokens, reason)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _usage(prompts: Iterable[int], told: Iterable[Told]) -> dict[str, int]:
    read, made = sum(prompts), sum(one.tokens for one in told)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


class _Times:
    """One answer's tokens and times, as metrics of the model."""

    def __init__(self, context: Any, index: int, engine: Engine) -> None:
        self.tokens = 0
        self._metrics = context.metrics
        self._index = index
        self._engine = engine
        self._began = time.perf_counter()
        self._first: float | None = None

    def came(self, tokens: int) -> None:
        if tokens and self._first is None:
            self._first = time.perf_counter()
            if self._metrics is not None:
                self._metrics.add_time("TimeToFirstToken", round((self._first - self._began) * 1000, 2), self._index)
                if self._engine.use is not None:
                    self._metrics.add_percent("CacheUse", round(100 * self._engine.use, 2), self._index)
        self.tokens += tokens

    def ended(self, prompt: int) -> None:
        if self._metrics is None:
            return
        self._metrics.add_counter("PromptTokens", prompt, self._index)
        self._metrics.add_counter("GeneratedTokens", self.tokens, self._index)
        seconds = time.perf_counter() - (self._first or self._began)
        if self.tokens > 1 and seconds > 0:
            from handlers.metrics import MetricTypes

            rate = round((self.tokens - 1) / seconds, 2)  # the first one took the prompt's time
            self._metrics.add_metric("TokensPerSecond", rate, "tokens", self._index, (), MetricTypes.GAUGE)


def model_folder(context: Any) -> Path:
    """Where the model's ``config.json`` is: where ``serializedFile`` lies or leads, or the archive itself."""
    root = Path(context.system_properties["model_dir"])
    named = ((context.manifest or {}).get("model") or {}).get("serializedFile")
    places = [root / named, (root / named).parent, root] if named else [root]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise HandlerLoadError(
        f"{places[0]}: there is no config.json: llm serves the folder that a model's and its tokenizer's "
        "save_pretrained write. Archive all of its files."
    )


def _generation(folder: Path, tokenizer: Any) -> tuple[Sampling, tuple[int, ...]]:
    """How the folder's authors want tokens drawn, greedily unless they say otherwise, and which tokens end a text."""
    from transformers import AutoConfig, GenerationConfig

    try:
        wanted = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # there is none: what the model's own configuration holds
        wanted = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    ends = wanted.eos_token_id if wanted.eos_token_id is not None else tokenizer.eos_token_id
    ends = () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    if not wanted.do_sample:
        return Sampling(), ends
    values = {"temperature": wanted.temperature, "top_k": wanted.top_k, "top_p": wanted.top_p}
    return Sampling(**{"temperature": 1.0, **{key: value for key, value in values.items() if value is not None}}), ends


def read(row: Mapping[str, Any], default: Sampling) -> Wish:
    """What a row asks for. Raises PredictionException 400 that names what cannot be read and what it may be."""
    said = row.get("body", row.get("data")) if "body" in row or "data" in row else dict(row)
    if isinstance(said, (bytes, bytearray, memoryview)):
        said = _text("the request", said)
        if said.lstrip().startswith("{"):
            try:
                said = json.loads(said)
            except ValueError as error:
                raise PredictionException(f"The request is no JSON: {error}.", 400) from None
    if isinstance(said, str):
        said = {"prompt": said}
    if not isinstance(said, Mapping):
        raise PredictionException('A request is a text, or JSON: {"prompt": "Once upon a time"}.', 400)
    given: dict[str, Any] = {}
    for key, value in [*said.items(), *_parameters(said)]:
        word = _SYNONYMS.get(key, key)
        if word in ("prompt", *_WORDS):
            if word in given:
                raise PredictionException(f"{word} is given twice (also as {key}): give it once.", 400)
            given[word] = value
        elif key != "parameters":
            raise PredictionException(f"{key!r} is not known: there are prompt, {', '.join(_WORDS)}.", 400)
    if given.get("prompt") is None:
        raise PredictionException('There is no prompt: send a text, or {"prompt": "Once upon a time"}.', 400)
    return Wish(
        _prompt(given["prompt"]),
        _number(given, "max_new_tokens", int, None, 1, None),
        _sampling(given, default),
        _stop_strings(given.get("stop")),
        _yes(given.get("stream")),
    )


def _parameters(said: Mapping[str, Any]) -> list[tuple[str, Any]]:
    nested = said.get("parameters")
    if nested is not None and not isinstance(nested, Mapping):
        raise PredictionException("parameters is an object, such as {\"temperature\": 0.7}.", 400)
    return list((nested or {}).items())


def _sampling(given: Mapping[str, Any], default: Sampling) -> Sampling:
    drawn = any(given.get(word) is not None for word in ("top_p", "top_k", "seed"))
    return Sampling(
        _number(given, "temperature", float, default.temperature or (1.0 if drawn else 0.0), 0, 100),
        _number(given, "top_k", int, default.top_k, 0, None),
        _number(given, "top_p", float, default.top_p, 0, 1),
        _number(given, "seed", int, default.seed, 0, 2**63 - 1),
    )


def _number(
    given: Mapping[str, Any], word: str, kind: Callable[[Any], Any], default: Any, least: float, most: float | None
) -> Any:
    value = given.get(word)
    if value is None:
        return default
    try:
        if isinstance(value, (bytes, bytearray)):  # a field of a form
            value = value.decode()
        number = kind(value)
        right = not isinstance(value, bool) and (isinstance(value, str) or number == value)
        right = right and number >= least and (most is None or number <= most)
    except (TypeError, ValueError, OverflowError):
        right = False
    if not right:
        what = "a whole number" if kind is int else "a number"
        limits = f"from {least:g}" if most is None else f"from {least} to {most}"
        raise PredictionException(f"{word} is {value!r}; it is {what} {limits}.", 400)
    return number


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, (bytes, bytearray)):
        value = _text("prompt", value)
    if isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        return value
    raise PredictionException("prompt is a text, or a list of token ids.", 400)


def _stop_strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, (bytes, bytearray)):
        value = _text("stop", value)
    stops = [value] if isinstance(value, str) else value or []
    right = isinstance(stops, list) and len(stops) <= _STOPS and all(isinstance(s, str) and s for s in stops)
    if not right:
        raise PredictionException(f"stop is a text, or a list of up to {_STOPS} texts, none of them empty.", 400)
    return tuple(stops)


def _yes(value: Any) -> bool:
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode(errors="replace")
    words = {None: False, True: True, False: False, "true": True, "false": False}
    if isinstance(value, (str, bool, type(None))) and value in words:
        return words[value]
    raise PredictionException(f"stream is {value!r}; it is true or false.", 400)


def _text(what: str, value: Any) -> str:
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise PredictionException(f"{what} is no UTF-8 text: {error}.", 400) from None
