"""Resources of nodes, as Ray counts them: CPUs, GPUs, and memory in bytes."""

from __future__ import annotations


def format_amount(kind: str, amount: float) -> str:
    """Return an amount of a resource as text; memory in GiB or MiB."""
    if kind != "memory":
        return f"{amount:g}"
    gib = amount / (1 << 30)
    return f"{gib:.3g} GiB" if gib >= 1 else f"{amount / (1 << 20):.3g} MiB"
