"""The pages of the console; each module registers those of its feature when it is imported."""

from __future__ import annotations

from importlib import import_module

_MODULES = (
    "login",
    "overview",
    "models",
    "try_it",
    "traffic",
    "experiments",
    "rollouts",
    "shadows",
    "drift",
    "workflows",
    "async_predictions",
    "events",
)


def register_pages() -> None:
    """Register every page with NiceGUI."""
    for name in _MODULES:
        import_module(f"{__name__}.{name}")
