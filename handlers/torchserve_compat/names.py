"""TorchServe's module names, so that archives written for them import this package's counterparts."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_TIMED = {"timed": "handlers.torchserve_compat.timer:timed"}
_BASE = {"BaseHandler": "handlers.base:BaseHandler"}
_VISION = {"VisionHandler": "handlers.builtin.vision:VisionHandler"}
_CONTEXT = {"Context": "handlers.context:Context"}
_ENVELOPE = {"BaseEnvelope": "handlers.envelopes.base:BaseEnvelope"}
_LABEL = {"map_class_to_label": "handlers.builtin.labels:map_class_to_label"}
_CLASSES = {"list_classes_from_module": "handlers.loading.module_loader:list_classes_from_module"}
_EXCEPTION = {"PredictionException": "handlers.errors:PredictionException"}
_SEND = {
    "send_intermediate_predict_response": (
        "handlers.torchserve_compat.intermediate:send_intermediate_predict_response"
    )
}
_CHECKED = {
    "check_valid_pt2_backend": "handlers.optimize.compile:check_valid_pt2_backend",
    "load_label_mapping": "handlers.builtin.labels:load_label_mapping",
    **_CLASSES,
}
_DIMENSION = {"Dimension": "handlers.metrics.metric:Dimension"}
_METRIC_TYPES = {"MetricTypes": "handlers.metrics.metric:MetricTypes"}
_UNITS = {"Units": "handlers.metrics.metric:Units"}
_VERSION = {"__version__": "handlers.context:SERVER_VERSION"}

# TorchServe's module -> its name -> the counterpart, as "module:name", imported when an archive uses it.
NAMES: dict[str, dict[str, str]] = {
    "ts": _VERSION,
    "ts.version": _VERSION,
    "ts.context": {**_CONTEXT, "RequestProcessor": "handlers.context:RequestProcessor"},
    "ts.service": {
        **_CONTEXT,
        **_EXCEPTION,
        "RequestProcessor": "handlers.context:RequestProcessor",
        "emit_metrics": "handlers.metrics:emit_metrics",
        "get_yaml_config": "handlers.torchserve_compat.model_config:get_yaml_config",
    },
    "ts.utils.hf_utils": {"download_model": "handlers.torchserve_compat.hub:download_model"},
    "ts.utils.timeit_decorator": {"timeit": "handlers.torchserve_compat.timer:timeit"},
    "ts.utils.util": {
        **_CHECKED,
        **_EXCEPTION,
        **_LABEL,
        "CLEANUP_REGEX": "handlers.builtin.text:CLEANUP_REGEX",
        "PT2Backend": "handlers.optimize.compile:PT2Backend",
        "deprecated": "handlers.torchserve_compat.deprecation:deprecated",
        "get_yaml_config": "handlers.torchserve_compat.model_config:get_yaml_config",
    },
    "ts.handler_utils.distributed.deepspeed": {
        **_CONTEXT,
        "get_ds_engine": "handlers.torchserve_compat.sharded_handlers:get_ds_engine",
    },
    "ts.handler_utils.distributed.pt_pippy": {
        "get_pipeline_driver": "handlers.torchserve_compat.sharded_handlers:get_pipeline_driver"
    },
    "ts.handler_utils.hf_batch_streamer": {
        "TextIteratorStreamerBatch": "handlers.engines.streamer:TextIteratorStreamerBatch"
    },
    "ts.handler_utils.micro_batching": {
        "HANDLER_METHODS": "handlers.micro_batching:STAGES",
        "MicroBatching": "handlers.micro_batching:MicroBatching",
        "PROFILER_AVAILABLE": "handlers.loading.optional_deps:PROFILER_AVAILABLE",
    },
    "ts.handler_utils.preprocess.dali": {"get_dali_pipeline": "handlers.builtin.dali:get_dali_pipeline"},
    "ts.handler_utils.text_utils": {
        "get_tokenizer": "handlers.torchserve_compat.tokens:get_tokenizer",
        "ngrams_iterator": "handlers.torchserve_compat.tokens:ngrams_iterator",
    },
    "ts.handler_utils.timer": _TIMED,
    "ts.handler_utils.utils": {
        **_CONTEXT,
        **_SEND,
        "import_class": "handlers.loading.module_loader:import_class",
    },
    "ts.metrics.caching_metric": {
        **_DIMENSION,
        **_METRIC_TYPES,
        "CachingMetric": "handlers.metrics.metric:CachingMetric",
        "MetricAbstract": "handlers.metrics.metric:MetricAbstract",
    },
    "ts.metrics.dimension": _DIMENSION,
    "ts.metrics.metric": {
        **_METRIC_TYPES,
        **_UNITS,
        "CachingMetric": "handlers.metrics.metric:CachingMetric",
        "Metric": "handlers.metrics.metric:Metric",
    },
    "ts.metrics.metric_abstract": {
        **_METRIC_TYPES,
        **_UNITS,
        "MetricAbstract": "handlers.metrics.metric:MetricAbstract",
    },
    "ts.metrics.metric_cache_abstract": {
        **_DIMENSION,
        **_METRIC_TYPES,
        "MetricAbstract": "handlers.metrics.metric:MetricAbstract",
        "MetricCacheAbstract": "handlers.metrics.metric:MetricCache",
    },
    "ts.metrics.metric_cache_errors": {
        name: f"handlers.metrics.metric:{name}"
        for name in (
            "GeneralMetricsCacheError",
            "MetricsCacheIOError",
            "MetricsCacheKeyError",
            "MetricsCachePyYamlError",
            "MetricsCacheTypeError",
            "MetricsCacheValueError",
        )
    },
    "ts.metrics.metric_cache_yaml_impl": {
        **_METRIC_TYPES,
        "CachingMetric": "handlers.metrics.metric:CachingMetric",
        "MetricCacheAbstract": "handlers.metrics.metric:MetricCache",
        "MetricsCacheYamlImpl": "handlers.metrics.metric:MetricsCacheYamlImpl",
    },
    "ts.metrics.metric_type_enum": _METRIC_TYPES,
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
    "ts.metrics.unit": _UNITS,
    "ts.protocol.otf_message_handler": {
        **_SEND,
        "deprecated": "handlers.torchserve_compat.deprecation:deprecated",
    },
    "ts.torch_handler.base_handler": {
        **_BASE,
        **_CHECKED,
        **_TIMED,
        **{
            name: f"handlers.loading.optional_deps:{name}"
            for name in (
                "IPEX_AVAILABLE",
                "ONNX_AVAILABLE",
                "PROFILER_AVAILABLE",
                "PT230_AVAILABLE",
                "PT2_AVAILABLE",
                "XLA_AVAILABLE",
            )
        },
    },
    "ts.torch_handler.contractions": {
        "CONTRACTION_MAP": "handlers.torchserve_compat.contractions:CONTRACTION_MAP"
    },
    "ts.torch_handler.dali_handler": {
        **_BASE,
        "DALIHandler": "handlers.builtin.dali:DALIHandler",
        "get_dali_pipeline": "handlers.builtin.dali:get_dali_pipeline",
    },
    "ts.torch_handler.dali_image_classifier": {
        **_LABEL,
        "DALIHandler": "handlers.builtin.dali:DALIHandler",
        "DALIImageClassifier": "handlers.builtin.dali:DALIImageClassifier",
    },
    "ts.torch_handler.densenet_handler": {
        **_CLASSES,
        "DenseNetHandler": "handlers.builtin.densenet:DenseNetHandler",
    },
    "ts.torch_handler.distributed.base_deepspeed_handler": {
        **_BASE,
        **_CONTEXT,
        "BaseDeepSpeedHandler": "handlers.torchserve_compat.sharded_handlers:BaseDeepSpeedHandler",
    },
    "ts.torch_handler.distributed.base_pippy_handler": {
        **_BASE,
        "BasePippyHandler": "handlers.torchserve_compat.sharded_handlers:BasePippyHandler",
    },
    "ts.torch_handler.image_classifier": {
        **_LABEL,
        **_TIMED,
        **_VISION,
        "ImageClassifier": "handlers.builtin.image_classifier:ImageClassifier",
    },
    "ts.torch_handler.image_segmenter": {
        **_VISION,
        "ImageSegmenter": "handlers.builtin.image_segmenter:ImageSegmenter",
    },
    "ts.torch_handler.object_detector": {
        **_LABEL,
        **_VISION,
        "ObjectDetector": "handlers.builtin.object_detector:ObjectDetector",
    },
    "ts.torch_handler.request_envelope.base": _ENVELOPE,
    "ts.torch_handler.request_envelope.body": {
        **_ENVELOPE,
        "BodyEnvelope": "handlers.envelopes.body:BodyEnvelope",
    },
    "ts.torch_handler.request_envelope.json": {
        **_ENVELOPE,
        "JSONEnvelope": "handlers.envelopes.json:JSONEnvelope",
    },
    "ts.torch_handler.request_envelope.kserve": {
        **_ENVELOPE,
        "KServeEnvelope": "handlers.envelopes.kserve:KServeEnvelope",
    },
    "ts.torch_handler.request_envelope.kservev2": {
        **_ENVELOPE,
        "KServev2Envelope": "handlers.envelopes.kservev2:KServev2Envelope",
    },
    "ts.torch_handler.text_classifier": {
        **_LABEL,
        "TextClassifier": "handlers.builtin.text_classifier:TextClassifier",
        "TextHandler": "handlers.builtin.text:TextHandler",
        "ngrams_iterator": "handlers.torchserve_compat.tokens:ngrams_iterator",
    },
    "ts.torch_handler.text_handler": {
        **_BASE,
        "CLEANUP_REGEX": "handlers.builtin.text:CLEANUP_REGEX",
        "CONTRACTIONS_PATTERN": "handlers.torchserve_compat.contractions:CONTRACTIONS_PATTERN",
        "CONTRACTION_MAP": "handlers.torchserve_compat.contractions:CONTRACTION_MAP",
        "TextHandler": "handlers.builtin.text:TextHandler",
        "get_tokenizer": "handlers.torchserve_compat.tokens:get_tokenizer",
    },
    "ts.torch_handler.trt_llm_handler": {
        **_BASE,
        **_SEND,
        "TRTLLMHandler": "handlers.torchserve_compat.trt_llm_handler:TRTLLMHandler",
    },
    "ts.torch_handler.vision_handler": {**_BASE, **_TIMED, **_VISION},
    "ts.torch_handler.vllm_handler": {
        **_BASE,
        **_EXCEPTION,
        **_SEND,
        "VLLMHandler": "handlers.torchserve_compat.vllm_handler:VLLMHandler",
    },
}

_SERVER = (
    "It is a part of TorchServe's own server, which Torchrelay replaces. A handler uses its context "
    "instead; handlers.load runs one without a server."
)
_CLASS = "Write a class with initialize(context) and handle(data, context), or extend BaseHandler."
_ONNX = (
    "BaseHandler loads an .onnx file by itself: self.model is the graph, and self.model.session its session."
)
_METRICS = "A handler measures through context.metrics; a metric's kinds and units are in handlers.metrics."
_START = (
    "Start the server with `torchrelay start`, stop it with `torchrelay stop`, and register a model with "
    "`torchrelay models` or POST /models."
)
_LAUNCHER = "Run `torchrelay llm-launcher`, which has the same flags."
_DEEPSPEED = "get_ds_engine reads the weights of handler: model_path by itself."
_PIPPY = (
    "PiPPy is discontinued. get_pipeline_driver splits transformers' models; for a model of your own, use "
    "torch.distributed.pipelining in initialize, or device_map."
)
# Packages that archives of TorchServe import and that are discontinued -> the replacement.
REPLACED = {"pippy": _PIPPY}

# TorchServe's module, or "module:name" -> the alternative, which the error of a use has. Both can be
# imported, so that a file that uses neither loads.
REPLACEMENT_HINTS: dict[str, str] = {
    "ts.arg_parser": _SERVER,
    "ts.async_service": _SERVER,
    "ts.handler_utils.distributed.deepspeed": _DEEPSPEED,
    "ts.handler_utils.distributed.pt_pippy": _PIPPY,
    "ts.handler_utils.micro_batching": "MicroBatching has its threads and queues to itself.",
    "ts.handler_utils.utils": _SERVER,
    "ts.launcher": _START,
    "ts.llm_launcher": _LAUNCHER,
    "ts.metrics.metric:MetricUnit": _METRICS,
    "ts.metrics.metric_abstract:MetricUnit": _METRICS,
    "ts.metrics.metric_collector": _METRICS,
    "ts.metrics.metric_encoder": _METRICS,
    "ts.metrics.metrics_store": _METRICS,
    "ts.metrics.process_memory_metric": _METRICS,
    "ts.metrics.system_metrics": "The server itself measures the system.",
    "ts.model_loader": _SERVER,
    "ts.model_server": _START,
    "ts.model_service.model_service": _CLASS,
    "ts.model_service_worker": _SERVER,
    "ts.protocol.otf_message_handler": _SERVER,
    "ts.service": _SERVER,
    "ts.torch_handler.base_handler:setup_ort_session": _ONNX,
    "ts.torch_handler.distributed.base_pippy_handler": _PIPPY,
    "ts.version": "The version is __version__.",
    "ts.utils.setup_model_venv": (
        "`runtime.install_py_dep_per_model` gives each archive's requirements an environment."
    ),
}

_MODULES = {*NAMES, *(target.partition(":")[0] for target in REPLACEMENT_HINTS)}
PACKAGES = {name[:end] for name in _MODULES for end, letter in enumerate(name) if letter == "."}


def install() -> None:
    """Make ``import ts...`` import this package's counterparts in this process.

    They replace a package ``ts`` that is installed or already imported.
    """
    if any(isinstance(finder, _TorchServeFinder) for finder in sys.meta_path):
        return
    for name in [name for name in sys.modules if name == "ts" or name.startswith("ts.")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _TorchServeFinder())


class _TorchServeFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        if fullname != "ts" and not fullname.startswith("ts."):
            return None
        if fullname not in _MODULES and fullname not in PACKAGES:
            available = ", ".join(sorted(_MODULES))
            raise ImportError(
                f"Torchrelay has no module {fullname}. Of TorchServe's it has {available}.", name=fullname
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname in PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        names = NAMES.get(module.__name__, {})
        for name in names:
            if name.startswith("__"):  # Python looks it up without __getattr__
                setattr(module, name, _resolve(names[name]))

        def lookup(name: str) -> Any:
            if name in names:
                value = _resolve(names[name])
                setattr(module, name, value)
                return value
            submodule = f"{module.__name__}.{name}"
            if submodule in _MODULES or submodule in PACKAGES:
                return importlib.import_module(submodule)
            if name == "logger":  # every module of TorchServe has one
                return logging.getLogger(module.__name__)
            if name.startswith("__") or module.__name__ in PACKAGES:  # the import system probes for it
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            if not {module.__name__, f"{module.__name__}:{name}"}.isdisjoint(REPLACEMENT_HINTS):
                return _Unavailable(name, (), {"_message": _format_missing(module.__name__, name)})
            raise ImportError(_format_missing(module.__name__, name), name=module.__name__)

        module.__getattr__ = lookup  # type: ignore[method-assign]
        module.__all__ = sorted(names)  # type: ignore[attr-defined]


class _Unavailable(type):
    """A name of TorchServe's without a counterpart: it may be imported, as for a type hint, and not used."""

    _message = ""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(cls._message)

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(cls._message if not name.startswith("__") else name)


def _format_missing(module: str, name: str) -> str:
    hint = REPLACEMENT_HINTS.get(f"{module}:{name}") or REPLACEMENT_HINTS.get(module)
    available = f" It has {', '.join(sorted(NAMES[module]))}." if module in NAMES else ""
    return f"Torchrelay's {module} has no {name}.{available}{' ' + hint if hint else ''}"


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
