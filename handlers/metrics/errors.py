"""The errors of the metrics API, each of which is also a built-in error."""

from __future__ import annotations

import yaml


class GeneralMetricsCacheError(Exception):
    """A metrics file cannot be read for a reason that has no class of its own."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Generic error: {message}")


class MetricsCacheIOError(OSError):
    """A metrics file cannot be read."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Error reading file: {message}")


class MetricsCachePyYamlError(yaml.YAMLError):
    """A metrics file is not YAML."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Error parsing file: {message}")


class MetricsCacheTypeError(TypeError):
    """An argument has the wrong type."""

    def __init__(self, message: str) -> None:
        super().__init__(str(message))


class MetricsCacheValueError(ValueError):
    """A unit, or a section of a metrics file, is invalid."""

    def __init__(self, message: str) -> None:
        super().__init__(str(message))


class MetricsCacheKeyError(KeyError):
    """A metric does not exist."""

    def __init__(self, message: str) -> None:
        super().__init__(str(message))
