"""The errors of LoRA adapters."""

from __future__ import annotations

from serve_app.errors import BadRequest, Conflict, NotFound


class AdapterNotFound(NotFound, reason="adapter_not_found", fields=("model", "adapter", "names")):
    template = "Model {model} has no adapter {adapter!r}. Its adapters: {names}."


class AdapterExists(Conflict, reason="adapter_exists", fields=("model", "version", "adapter")):
    template = "Version {version} of model {model} has an adapter {adapter} already; remove it first."


class AdapterRejected(BadRequest, reason="adapter_rejected", fields=("adapter", "problem")):
    """An adapter that the engine cannot apply to its model."""

    template = "Adapter {adapter} cannot be loaded: {problem}"
