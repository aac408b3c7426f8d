"""The response header that names the fields of a request which had no effect."""

from __future__ import annotations

from collections.abc import Sequence

HEADER = "x-torchrelay-ignored"
_MAX_NAMES = 20


def format_ignored(names: Sequence[str]) -> str:
    """Return unknown fields for the header, in which any client's text must be safe."""
    plain = [name[:64] for name in names if name.isascii() and name.replace("-", "_").isidentifier()]
    shown = plain[:_MAX_NAMES]
    others = [f"{len(names) - len(shown)} others"] if len(shown) < len(names) else []
    return ", ".join([*shown, *others])
