"""Which version a call gets. Pure functions of the table and the call: no state, no clock.

A policy is a name in ``POLICIES``; the table carries each model's as plain data, so that it
crosses processes and is stored as it stands.
"""

from __future__ import annotations

from collections.abc import Callable

from serve_app.errors import ModelNotFound, VersionNotFound
from serve_app.types import Call, ModelRow, Table, VersionRow


def default(model: ModelRow, call: Call) -> str:
    """Every call gets the model's default version."""
    return model.default


POLICIES: dict[str, Callable[[ModelRow, Call], str]] = {"default": default}


def choose(table: Table, call: Call) -> VersionRow:
    """The version that answers ``call``: the one it names, else the one its model's policy picks.

    Raises ModelNotFound and VersionNotFound.
    """
    model = table.models.get(call.model)
    if model is None:
        raise ModelNotFound(call.model)
    version = call.version or POLICIES[model.policy["policy"]](model, call)
    row = model.versions.get(version)
    if row is None:
        raise VersionNotFound(call.model, version)
    return row


def owns_fast_path(model: ModelRow) -> bool:
    """Whether one version takes all of the model's traffic, so that its route may skip the gateway."""
    return model.policy["policy"] == "default"
