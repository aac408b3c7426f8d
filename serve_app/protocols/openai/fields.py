"""Fields of request bodies that this server does not know."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from handlers import ignored_fields
from serve_app.protocols.openai.errors import InvalidField

# Inputs of the other routes, and fields of other servers that change vectors or scores.
_EFFECTIVE = frozenset(
    (
        *("input", "messages", "prompt", "query", "documents", "text_1", "text_2"),
        *("input_type", "instruction", "max_tokens_per_doc", "normalize", "pooling", "prompt_name"),
        *("rank_fields", "task", "truncate", "truncate_prompt_tokens", "truncation"),
    )
)


def find_ignored(body: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the fields of ``body`` that are not ``known``; null is as absent.

    Raises InvalidField for one that would change the response.
    """
    unknown = [field for field, value in body.items() if field not in known and value is not None]
    for field in unknown:
        if field in _EFFECTIVE:
            raise InvalidField(f"{field} is not served: leave it out.", field)
    return tuple(sorted(unknown))


def build_ignored_header(names: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Return the header of a response that names the ignored fields, if there are any."""
    return [(ignored_fields.HEADER.encode(), ignored_fields.format_ignored(names).encode())] if names else []
