"""Import paths of earlier versions that no longer exist, with the module that replaces each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

MOVED: dict[str, str] = {
    "handlers.accuracy": "handlers.optimize.tolerance_gate",
    "handlers.causal_lm": "handlers.builtin.causal_lm",
    "handlers.compilation": "handlers.optimize.compile",
    "handlers.contractions": "handlers.torchserve_compat.contractions",
    "handlers.dali": "handlers.builtin.dali",
    "handlers.degrees": "handlers.distributed.degrees",
    "handlers.densenet": "handlers.builtin.densenet",
    "handlers.deprecation": "handlers.torchserve_compat.deprecation",
    "handlers.device": "handlers.loading.device",
    "handlers.explanations": "handlers.explain.attributions",
    "handlers.extensions": "handlers.loading.optional_deps",
    "handlers.functions": "handlers.loading.workflow_functions",
    "handlers.hub": "handlers.torchserve_compat.hub",
    "handlers.huggingface": "handlers.builtin.huggingface",
    "handlers.image_segmenter": "handlers.builtin.image_segmenter",
    "handlers.labels": "handlers.builtin.labels",
    "handlers.mii": "handlers.distributed.mii",
    "handlers.model_config": "handlers.torchserve_compat.model_config",
    "handlers.object_detector": "handlers.builtin.object_detector",
    "handlers.onnx_handler": "handlers.builtin.onnx",
    "handlers.openai": "handlers.engines.openai",
    "handlers.optimisation": "handlers.optimize.apply",
    "handlers.parts": "handlers.multipart",
    "handlers.perturbation": "handlers.explain.occlusion",
    "handlers.pickles": "handlers.loading.pickle_scan",
    "handlers.placement": "handlers.distributed.placement",
    "handlers.rejections": "handlers.row_errors",
    "handlers.sharding": "handlers.distributed.process_group",
    "handlers.source": "handlers.loading.module_loader",
    "handlers.streamer": "handlers.engines.streamer",
    "handlers.tensor_rows": "handlers.tensor_batch",
    "handlers.text": "handlers.builtin.text",
    "handlers.text_classifier": "handlers.builtin.text_classifier",
    "handlers.timer": "handlers.torchserve_compat.timer",
    "handlers.tokens": "handlers.torchserve_compat.tokens",
    "handlers.torchserve_names": "handlers.torchserve_compat.names",
    "handlers.unexplained": "handlers.explain.unsupported",
    "handlers.variants": "handlers.optimize.search",
    "handlers.vocabulary": "handlers.torchserve_compat.vocabulary",
    "handlers.weights": "handlers.loading.weights",
}


class MovedModuleFinder(MetaPathFinder):
    """A finder that raises ImportError with the new path when an archive imports a moved module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Return None for every other module, so that the import continues.

        Raises ImportError when ``name`` is a moved module.
        """
        if (new := MOVED.get(name)) is not None:
            raise ImportError(f"The module {name} was moved: import {new} instead.", name=name)


def install() -> None:
    """Add the finder behind the regular ones, once for a process."""
    if not any(isinstance(finder, MovedModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedModuleFinder())
