"""TorchServe's module names, so that an archive written for them imports ours."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# module of TorchServe -> its name -> ours, as "module:name". Imported when an archive asks for it.
NAMES: dict[str, dict[str, str]] = {
    "ts": {"__version__": "handlers.context:SERVER_VERSION"},
    "ts.version": {"__version__": "handlers.context:SERVER_VERSION"},
    "ts.context": {
        "Context": "handlers.context:Context",
        "RequestProcessor": "handlers.context:RequestProcessor",
    },
    "ts.service": {"PredictionException": "handlers.errors:PredictionException"},
    "ts.utils.util": {
        "PredictionException": "handlers.errors:PredictionException",
        "load_label_mapping": "handlers.labels:load_label_mapping",
        "map_class_to_label": "handlers.labels:map_class_to_label",
        "list_classes_from_module": "handlers.source:list_classes_from_module",
    },
    "ts.handler_utils.utils": {
        "send_intermediate_predict_response": "handlers.intermediate:send_intermediate_predict_response",
        "import_class": "handlers.source:import_class",
    },
    "ts.handler_utils.timer": {"timed": "handlers.timer:timed"},
    "ts.metrics.caching_metric": {"CachingMetric": "handlers.metrics.metric:CachingMetric"},
    "ts.metrics.dimension": {"Dimension": "handlers.metrics.dimension:Dimension"},
    "ts.metrics.metric": {"Metric": "handlers.metrics.metric:Metric"},
    "ts.metrics.metric_abstract": {"MetricAbstract": "handlers.metrics.metric:MetricAbstract"},
    "ts.metrics.metric_cache_abstract": {"MetricCacheAbstract": "handlers.metrics.cache:MetricCache"},
    "ts.metrics.metric_cache_errors": {
        name: f"handlers.metrics.errors:{name}"
        for name in (
            "GeneralMetricsCacheError",
            "MetricsCacheIOError",
            "MetricsCacheKeyError",
            "MetricsCachePyYamlError",
            "MetricsCacheTypeError",
            "MetricsCacheValueError",
        )
    },
    "ts.metrics.metric_cache_yaml_impl": {"MetricsCacheYamlImpl": "handlers.metrics.cache:MetricsCacheYamlImpl"},
    "ts.metrics.metric_type_enum": {"MetricTypes": "handlers.metrics.types:MetricTypes"},
    "ts.metrics.system_metrics": {
        name: f"handlers.metrics.system:{name}"
        for name in (
            "cpu_utilization",
            "disk_available",
            "disk_used",
            "disk_utilization",
            "gpu_utilization",
            "memory_available",
            "memory_used",
            "memory_utilization",
        )
    },
    "ts.metrics.unit": {"Units": "handlers.metrics.units:Units"},
    "ts.protocol.otf_message_handler": {
        "send_intermediate_predict_response": "handlers.intermediate:send_intermediate_predict_response",
    },
    "ts.torch_handler.base_handler": {"BaseHandler": "handlers.base:BaseHandler"},
    "ts.torch_handler.vision_handler": {"VisionHandler": "handlers.vision:VisionHandler"},
    "ts.torch_handler.image_classifier": {"ImageClassifier": "handlers.image_classifier:ImageClassifier"},
    "ts.torch_handler.request_envelope.base": {"BaseEnvelope": "handlers.envelopes.base:BaseEnvelope"},
}

PACKAGES = {name[:end] for name in NAMES for end, letter in enumerate(name) if letter == "."}


def install() -> None:
    """Make ``import ts...`` give ours in this process, even where a package ``ts`` is installed or imported."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in [name for name in sys.modules if name == "ts" or name.startswith("ts.")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if fullname != "ts" and not fullname.startswith("ts."):
            return None
        if fullname not in NAMES and fullname not in PACKAGES:
            known = ", ".join(sorted(NAMES))
            raise ImportError(f"Torchrelay has no module {fullname}. Of TorchServe's it has {known}.", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname in PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        names = NAMES.get(module.__name__, {})
        for name in names:
            if name.startswith("__"):  # asked for without __getattr__ ever being tried
                setattr(module, name, _ours(names[name]))

        def lookup(name: str) -> Any:
            if name in names:
                value = _ours(names[name])
                setattr(module, name, value)
                return value
            if name.startswith("__") or module.__name__ in PACKAGES:  # probed by the import system itself
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            known = ", ".join(sorted(names))
            raise ImportError(f"Torchrelay's {module.__name__} has no {name}. It has {known}.", name=module.__name__)

        module.__getattr__ = lookup  # type: ignore[method-assign]
        module.__all__ = sorted(names)  # type: ignore[attr-defined]


def _ours(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
