"""The ids of models in OpenAI's API: ``name`` and ``name:version``, each also with ``:adapter``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from typing_extensions import NotRequired, TypedDict

from serve_app.domain.access import matches
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.validation import documented
from serve_app.errors import AdapterNotFound


class OpenAIModel(TypedDict):
    """OpenAI's fields, and those of KServe's first protocol, which has the same addresses."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    name: str
    ready: bool
    parent: NotRequired[Annotated[str, documented("Of a LoRA adapter: the id of its base model.")]]


def parse_id(table: RoutingTable, id: str) -> tuple[str, str | None, str]:
    """Return the model, the version and the adapter that an id names; names contain no colon.

    The second part is the adapter of that name unless the model has such a version or label. Raises
    AdapterNotFound where the model has other adapters; unknown models and versions are returned.
    """
    model, _, rest = id.partition(":")
    first, colon, last = rest.partition(":")
    route = table.models.get(model)
    if not rest or route is None:
        return model, first or None, ""
    if (version := _find_version(route, first)) is not None:
        if last:
            _check_adapter(model, last, [version])
        return model, first, last
    versions = list(route.versions.values())
    if colon or not any(version.adapters for version in versions):
        return model, first, last
    _check_adapter(model, first, versions)
    return model, None, first


def list_models(table: RoutingTable, allowed_models: tuple[str, ...]) -> Iterator[OpenAIModel]:
    """Yield the models that are ready, their versions where there are several, and their adapters."""
    for name, model in sorted(table.models.items()):
        if matches(name, allowed_models):
            default = model.versions.get(model.default)
            if default is not None and is_ready(default):
                yield from _describe_with_adapters(name, default)
            if len(model.versions) > 1:
                for number, version in model.versions.items():
                    if is_ready(version):
                        yield from _describe_with_adapters(f"{name}:{number}", version)


def describe_model(id: str, parent: str = "") -> OpenAIModel:
    model: OpenAIModel = {
        "id": id,
        "object": "model",
        "created": 0,
        "owned_by": "torchrelay",
        "name": id,
        "ready": True,
    }
    return {**model, "parent": parent} if parent else model


def is_ready(version: VersionRoute) -> bool:
    """Return whether the version serves requests; a request starts one that is scaled to zero."""
    return version.phase in ("ready", "idle") or version.replicas > 0


def _describe_with_adapters(id: str, version: VersionRoute) -> Iterator[OpenAIModel]:
    yield describe_model(id)
    for adapter in sorted(version.adapters, key=lambda adapter: adapter.name):
        yield describe_model(f"{id}:{adapter.name}", id)


def _find_version(route: ModelRoute, name: str) -> VersionRoute | None:
    return route.versions.get(name) or route.versions.get(route.policy.labels.get(name, ""))


def _check_adapter(model: str, adapter: str, versions: list[VersionRoute]) -> None:
    names = {known.name for version in versions for known in version.adapters}
    if adapter not in names:
        raise AdapterNotFound(model, adapter, ", ".join(sorted(names)) or "none")
