"""What the metrics API raises. Each is also the built-in error that a caller may expect."""

from __future__ import annotations

import yaml


class GeneralMetricsCacheError(Exception):
    """A metrics file that cannot be taken, for no reason that has a class of its own."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Generic error: {message}")


class MetricsCacheIOError(OSError):
    """A metrics file that cannot be read."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Error reading file: {message}")


class MetricsCachePyYamlError(yaml.YAMLError):
    """A metrics file that is not YAML."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Error parsing file: {message}")


class MetricsCacheTypeError(TypeError):
    """An argument of the wrong type."""

    def __init__(self, message: str) -> None:
        super().__init__(str(message))


class MetricsCacheValueError(ValueError):
    """A unit, or a section of a metrics file, that there is not."""

    def __init__(self, message: str) -> None:
        super().__init__(str(message))


class MetricsCacheKeyError(KeyError):
    """A metric that nobody has added."""

    def __init__(self, message: str) -> None:
        super().__init__(str(message))
