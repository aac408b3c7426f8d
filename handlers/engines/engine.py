"""The interface of generation engines: they take token ids and stream token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from handlers.errors import HandlerLoadError, PredictionException

_MIN_TEMPERATURE = 1e-5  # as in vLLM; scores that are divided by less may overflow


@dataclass(frozen=True)
class StructuredOutput:
    """A format that constrains the generated text.

    ``value`` is a JSON Schema (``json``), a regular expression, or a JSON list of texts (``choice``), each as
    a text; ``json_object`` has none. Errors name the request's ``field``.
    """

    kind: Literal["json", "json_object", "regex", "choice"]
    value: str = ""
    field_name: str = field(default="response_format", compare=False)


@dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of a request.

    A ``temperature`` below 1e-5 is greedy decoding; ``top_k`` 0 and ``top_p`` 1 sample from all tokens. The
    same ``seed`` yields the same tokens whatever else is in the batch; None draws a new seed each time.
    ``logprobs`` requests the log-probability of each token and of that many most likely tokens; None requests
    neither. ``presence_penalty`` and ``frequency_penalty`` are subtracted from the logits of generated
    tokens, once and by their count. ``repetition_penalty`` divides the positive logits of the tokens of
    prompt and output, and multiplies the negative ones. ``logit_bias`` holds (token, addend) pairs.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    structured_output: StructuredOutput | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@dataclass(frozen=True)
class Logprob:
    """The natural log-probability of ``token`` before temperature, top k and top p.

    The first token of a prompt has none. ``top_tokens`` holds (token, log-probability) pairs, the most likely
    first.
    """

    token: int
    logprob: float | None
    top_tokens: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """A request with a unique ``id``; generation stops after any of ``stop_token_ids``.

    Requests share cached prefixes only with requests of the same ``cache_salt`` and the same adapter.
    ``adapter`` is the name of a loaded adapter; without one, the base model generates. ``prompt_logprobs``
    requests the log-probability of each token of the prompt and of that many most likely tokens; with it,
    ``max_new_tokens`` may be 0.
    """

    id: str
    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    adapter: str | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class GenerationChunk:
    """A chunk of new ``tokens``.

    Only the last chunk has a ``finish_reason``: ``stop``, ``length`` or ``abort``. ``logprobs`` has one entry
    per token where the request has ``logprobs``. The first chunk has ``prompt_logprobs`` where the request
    has; the others have none. ``cached_tokens`` is how many tokens of the prompt were in
    the cache, or None where the engine does not report it.
    """

    tokens: list[int]
    finish_reason: str | None = None
    logprobs: Sequence[Logprob] = ()
    cached_tokens: int | None = None
    prompt_logprobs: Sequence[Logprob] = ()


class Engine(Protocol):
    """A generator for many requests at once, used on the event loop that started it.

    ``capacity`` is the maximum number of tokens of a prompt and its completion together. ``cache_usage`` is
    the used share (0 to 1) of the token cache, or None where the engine does not report it. ``adapters``
    holds the names of the loaded LoRA adapters.
    """

    capacity: int

    @property
    def adapters(self) -> Sequence[str]: ...

    @property
    def cache_usage(self) -> float | None: ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of the completion. Closing the generator aborts the request.

        Raises PredictionException: 400 for an invalid request, 404 for an unknown adapter, 503 where the
        engine fails while it generates.
        """
        ...

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load the LoRA adapter in ``folder``, while requests run; it replaces a loaded one of that name.

        Raises HandlerLoadError, with the reason, for an adapter that the engine cannot apply to its model.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; those under way finish. Does nothing for an unknown name."""
        ...

    async def abort(self, id: str) -> None:
        """Abort a request: its generator ends with ``abort``, and its cache is freed.

        Does nothing where the request has finished.
        """
        ...

    async def check_health(self) -> None:
        """Raise RuntimeError, with the reason, where the engine cannot generate."""
        ...

    async def shutdown(self) -> None:
        """Abort all requests and free the memory. The engine accepts no requests afterwards."""
        ...


def read_prefix_caching(options: Mapping[str, Any]) -> bool:
    """Return the option ``prefix_caching``. Raises HandlerLoadError."""
    value = options.get("prefix_caching", True)
    if type(value) is not bool:
        raise HandlerLoadError(f"model-config.yaml: engine.prefix_caching is {value!r}; it is true or false.")
    return value


def validate_request(request: GenerationRequest, vocab_size: int, capacity: int) -> None:
    """Raise PredictionException 400, with the figures and the cure, for a request that no engine can run."""
    if not request.prompt:
        raise PredictionException("The prompt is empty: give it at least one token.", 400)
    _check_length(request, capacity)  # first, so that the others read no more tokens than the capacity
    invalid = next((t for t in request.prompt if type(t) is not int or not 0 <= t < vocab_size), None)
    if invalid is not None:
        raise PredictionException(
            f"{invalid!r} is no token of this model: its ids are 0 to {vocab_size - 1}.", 400
        )
    invalid = next((t for t, _ in request.sampling.logit_bias if not 0 <= t < vocab_size), None)
    if invalid is not None:
        raise PredictionException(
            f"logit_bias: {invalid} is no token of this model: its ids are 0 to {vocab_size - 1}.", 400
        )


def _check_length(request: GenerationRequest, capacity: int) -> None:
    if request.max_new_tokens < (0 if request.prompt_logprobs is not None else 1):
        raise PredictionException(f"max_new_tokens is {request.max_new_tokens}; it is 1 or more.", 400)
    total = len(request.prompt) + request.max_new_tokens
    if total > capacity:
        available = capacity - len(request.prompt)
        cure = (
            f"request at most {available} new tokens"
            if available > 0
            else f"shorten the prompt to less than {capacity}"
        )
        raise PredictionException(
            f"The prompt has {len(request.prompt)} tokens, and max_new_tokens is {request.max_new_tokens}: "
            f"together {total}, and the limit is {capacity}. Either {cure}, or raise the limit in "
            "the model's configuration (engine: num_blocks and page_size, up to the model's own context).",
            400,
        )
