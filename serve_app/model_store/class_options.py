"""The options of a model class's decorator, as keys of model-config.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import yaml

from serve_app.domain.validation import did_you_mean
from serve_app.errors import ConfigurationError
from serve_app.model_store.model_config import HANDLER_KEYS, ModelConfig

_KEYS = {f.name: f.metadata.get("key", f.name) for f in fields(ModelConfig) if f.metadata}


def to_config(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options by their keys in the file; ``replicas`` becomes minWorkers and maxWorkers.

    ``where`` is the place of the decorator. Raises ConfigurationError for unknown keys and invalid values.
    """
    config: dict[str, Any] = {}
    for name, value in options.items():
        if name == "replicas":
            config |= {"minWorkers": value, "maxWorkers": value}
        elif name in _KEYS or name in _KEYS.values() or name in HANDLER_KEYS:
            config[_KEYS.get(name, name)] = value
        else:
            near = did_you_mean(name, [*_KEYS, "replicas", *HANDLER_KEYS])
            hint = f"; did you mean {near!r}?" if near else "; it takes the keys of model-config.yaml"
            raise ConfigurationError(where, f"@torchrelay.model has no option {name!r}{hint}")
    parse(config, where)
    return config


def parse(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the configuration of a document. Raises ConfigurationError."""
    try:
        return ModelConfig.parse(yaml.safe_dump(dict(config)), where, strict=True)
    except yaml.YAMLError as error:
        raise ConfigurationError(where, f"an option has a value that YAML cannot hold: {error}") from None
