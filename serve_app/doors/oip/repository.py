"""The protocol's model repository onto the registry: models are loaded and unloaded by name, on no wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serve_app.controlplane import ControlPlane
from serve_app.doors.oip.errors import Unsupported
from serve_app.errors import ArchiveNotFound, InvalidBody, ModelNotFound
from serve_app.signature import short
from serve_app.types import Registration

_MOST = 1_000


async def load(control: ControlPlane, model: str, parameters: Mapping[str, Any], within: tuple[str, ...]) -> None:
    """Start a model that has no replicas, or else register the archive of its name in the model store; and wait.

    ``parameters`` may have ``url``, another archive, and ``workers``, how many replicas. A model that runs stays as
    it is. Raises RelayError.
    """
    for key in parameters:
        if key == "config" or key.startswith("file:"):
            raise Unsupported(
                f"The parameter {short(key)} of a load is not served: a model's configuration and files are its "
                "archive's. There are url and workers."
            )
        if key not in ("url", "workers"):
            raise InvalidBody(f"A load has no parameter {short(key)}. There are url and workers.")
    url, workers = parameters.get("url"), _workers(parameters.get("workers"))
    try:
        found = await control.describe(model) if url is None else []
    except ModelNotFound:
        found = []
    if found:
        stands = found[0].spec.max_workers > 0
        await control.scale(model, None, workers or (None if stands else 1), None, wait=True)
        return
    asked = Registration(
        url=f"{model}.mar" if url is None else str(url), model_name=model, initial_workers=workers or 1, within=within
    )
    try:
        await control.register(asked)
    except ArchiveNotFound:
        if url is not None:
            raise
        await control.register(replace(asked, url=model))


async def unload(control: ControlPlane, model: str) -> None:
    """Take all replicas of all versions of a model away; it stays registered. Raises ModelNotFound."""
    for description in await control.describe(model, every=True):
        await control.scale(model, description.spec.version, 0, None, wait=True)


def _workers(asked: Any) -> int | None:
    if asked is None:
        return None
    if type(asked) is not int or not 1 <= asked <= _MOST:
        raise InvalidBody(f"The parameter workers is {short(asked)}; it is a number from 1 to {_MOST}.")
    return asked
