"""The protocol's model repository on the registry: loading and unloading of models by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from typing_extensions import TypedDict

from serve_app.control.api import ControlPlane
from serve_app.domain.model import Registration
from serve_app.domain.signature import abbreviate
from serve_app.domain.validation import STRICT, documented
from serve_app.errors import ArchiveNotFound, InvalidBody, ModelNotFound
from serve_app.protocols.openinference.errors import UnsupportedFeature

_MAX_WORKERS = 1_000


class LoadParameters(TypedDict, total=False):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    url: Annotated[str, documented("Another archive.")]
    workers: Annotated[int, documented(minimum=1, maximum=_MAX_WORKERS)]


class ModelLoadRequest(TypedDict, total=False):
    parameters: LoadParameters


class IndexRequest(TypedDict, total=False):
    ready: Annotated[bool, documented("true: only ready versions.")]


async def load(
    control: ControlPlane, model: str, parameters: Mapping[str, Any], allowed_models: tuple[str, ...]
) -> None:
    """Start a model without replicas, or register the archive of its name, and wait until it is ready.

    The archive is taken from the model store. ``parameters`` may have ``url``, another archive, and
    ``workers``, the number of replicas. A running model stays as it is. Raises RelayError.
    """
    for key in parameters:
        if key == "config" or key.startswith("file:"):
            raise UnsupportedFeature(
                f"The parameter {abbreviate(key)} of a load is not served: a model's configuration and files "
                "are its archive's. There are url and workers."
            )
        if key not in ("url", "workers"):
            raise InvalidBody(f"A load has no parameter {abbreviate(key)}. There are url and workers.")
    url, workers = parameters.get("url"), _parse_workers(parameters.get("workers"))
    try:
        descriptions = await control.describe(model) if url is None else []
    except ModelNotFound:
        descriptions = []
    if descriptions:
        is_running = not descriptions[0].spec.has_no_workers
        await control.scale(model, None, workers or (None if is_running else 1), None, wait=True)
        return
    registration = Registration(
        url=f"{model}.mar" if url is None else str(url),
        model_name=model,
        initial_workers=workers or 1,
        allowed_models=allowed_models,
    )
    try:
        await control.register(registration)
    except ArchiveNotFound:
        if url is not None:
            raise
        await control.register(replace(registration, url=model))


async def unload(control: ControlPlane, model: str) -> None:
    """Remove all replicas of all versions of a model, which stays registered. Raises ModelNotFound."""
    for description in await control.describe(model, every=True):
        await control.scale(model, description.spec.version, 0, None, wait=True)


def _parse_workers(workers: Any) -> int | None:
    if workers is None:
        return None
    if type(workers) is not int or not 1 <= workers <= _MAX_WORKERS:
        raise InvalidBody(
            f"The parameter workers is {abbreviate(workers)}; it is a number from 1 to {_MAX_WORKERS}."
        )
    return workers
