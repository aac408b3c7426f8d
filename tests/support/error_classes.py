"""The classes of errors that a table from errors to statuses must cover."""

from __future__ import annotations

from serve_app.errors import RelayError


def list_subclasses(cls: type[RelayError] = RelayError) -> list[type[RelayError]]:
    """Return a class and all its subclasses, each once, by name."""
    found = {cls}.union(*(list_subclasses(child) for child in cls.__subclasses__()))
    return sorted(found, key=lambda each: each.__name__)
