"""What an engine is asked for and what it gives: token ids in, token ids out, piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from handlers.errors import PredictionException


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. ``temperature`` 0: the likeliest. ``top_k`` 0 and ``top_p`` 1: from all tokens.

    The same ``seed`` draws the same tokens again, whoever else is in the batch; None draws others each time.
    ``logprobs`` asks how likely each token was, beside so many of the likeliest; None does not ask.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class Logprob:
    """How likely ``token`` was: the natural logarithm, before temperature, top k and top p; ``likeliest`` in order."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """``id`` is this request's alone; ``end`` are the token ids that end an answer."""

    id: str
    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """The ``tokens`` that are new. The last chunk alone has a ``finish_reason``: ``stop``, ``length`` or ``abort``.

    ``logprobs`` are the tokens', one each, where the request asked for them.
    """

    tokens: list[int]
    finish_reason: str | None = None
    logprobs: Sequence[Logprob] = ()


class Engine(Protocol):
    """Generates for many requests at once, on the event loop that it was started on.

    ``capacity`` is how many tokens a prompt and its answer may have together, ``use`` the share (0 to 1) of the
    engine's memory for tokens that is taken; None where the engine does not say.
    """

    capacity: int

    @property
    def use(self) -> float | None: ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """The answer's chunks. Closing the iterator aborts the request.

        Raises PredictionException: 400 for a request that cannot be answered, 503 where the engine failed under it.
        """
        ...

    async def abort(self, id: str) -> None:
        """End that request: its iterator ends with ``abort``, and its place is free. Nothing where it is over."""
        ...

    async def check_health(self) -> None:
        """Raises RuntimeError, with the reason, where no request can be answered."""
        ...

    async def shutdown(self) -> None:
        """End what is under way, and free the memory. The engine answers nothing after it."""
        ...


def admit(request: GenerationRequest, vocabulary: int, capacity: int) -> None:
    """Refuse what no engine may be given. Raises PredictionException 400 with the figures and the cure."""
    if not request.prompt:
        raise PredictionException("The prompt is empty: give it at least one token.", 400)
    wrong = next((t for t in request.prompt if type(t) is not int or not 0 <= t < vocabulary), None)
    if wrong is not None:
        raise PredictionException(f"{wrong!r} is no token of this model: its ids are 0 to {vocabulary - 1}.", 400)
    if request.max_new_tokens < 1:
        raise PredictionException(f"max_new_tokens is {request.max_new_tokens}; it is 1 or more.", 400)
    asked = len(request.prompt) + request.max_new_tokens
    if asked > capacity:
        room = capacity - len(request.prompt)
        cure = f"ask for at most {room} new tokens" if room > 0 else f"shorten the prompt to less than {capacity}"
        raise PredictionException(
            f"The prompt has {len(request.prompt)} tokens, and max_new_tokens is {request.max_new_tokens}: together "
            f"{asked}, and there is room for {capacity}. Either {cure}, or have the model's configuration give more "
            "room (engine: num_blocks and page_size, up to the model's own context).",
            400,
        )
