"""LoRA adapters of a version of the handler ``llm``: the stored values, and the documents for clients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from typing_extensions import NotRequired, TypedDict

from serve_app.domain import validation
from serve_app.domain.urls import redact_url
from serve_app.domain.validation import STRICT, PendingStatus, documented

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter that a version should have; one of its own archive has a name only."""

    name: str
    url: str = ""  # as the caller gave it
    digest: str = ""  # sha256 of the stored archive
    archive: str = ""  # URI of the stored archive, the same from every node
    signed_by: str = ""  # fingerprint of the key that signed it; empty: not verified


@dataclass(frozen=True)
class AdapterRequest:
    """An adapter to load."""

    __pydantic_config__ = STRICT

    name: Annotated[str, documented("Requests name it as model:name.", pattern=f"^{_NAME.pattern}$")]
    url: Annotated[str, documented("A name in the model store, or a URL, as for an archive.")]
    sha256: Annotated[str | None, documented("The expected digest of the archive.")] = None

    def find_error(self) -> str:
        """Return the error of the values; empty where there is none."""
        if not _NAME.fullmatch(self.name):
            return "name: it has 1 to 128 letters, digits, '_', '.' and '-', and begins with no '.' or '-'"
        return "" if self.url else "url: it is empty"


class AdapterDocument(TypedDict):
    name: str
    model: Annotated[str, documented("The model of requests for it: model:name.")]
    version: str
    url: Annotated[str, documented("Empty for an adapter of the version's own archive.")]
    digest: str
    status: NotRequired[PendingStatus]


class AdapterList(TypedDict):
    adapters: list[AdapterDocument]


def read(document: Any) -> AdapterRequest:
    """Return an adapter to load. Raises BadRequest."""
    return validation.read_request(AdapterRequest, document, "adapter", AdapterRequest.find_error)


def find_static(config: Mapping[str, Any]) -> tuple[AdapterSpec, ...]:
    """Return the adapters that a model-config.yaml names in its archive."""
    engine = config.get("engine")
    folders = engine.get("adapters") if isinstance(engine, Mapping) else None
    return tuple(AdapterSpec(str(name)) for name in folders) if isinstance(folders, Mapping) else ()


def describe(adapters: Iterable[AdapterSpec], model: str, version: str) -> list[AdapterDocument]:
    """Return the adapters of a version by name."""
    return [
        {"name": a.name, "model": model, "version": version, "url": redact_url(a.url), "digest": a.digest}
        for a in sorted(adapters, key=lambda adapter: adapter.name)
    ]
