"""The registration of fuzzed functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_app.errors import AccessDenied, BadRequest, ConfigurationError, Forbidden

REFUSALS = (BadRequest, Forbidden, AccessDenied, ConfigurationError)


@dataclass(frozen=True)
class FuzzTarget:
    """A parser under test; ``seeds`` are its first inputs, ``dictionary`` the tokens of its language."""

    name: str
    run: Callable[[bytes], None]
    seeds: Sequence[bytes]
    dictionary: Sequence[bytes] = ()
    max_length: int = 4096


TARGETS: dict[str, FuzzTarget] = {}


def target(
    seeds: Sequence[bytes], dictionary: Sequence[bytes] = (), max_length: int = 4096
) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    """Register a function as the target of its own name, with hyphens."""

    def register(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
        name = run.__name__.replace("_", "-")
        TARGETS[name] = FuzzTarget(name, run, seeds, dictionary, max_length)
        return run

    return register
