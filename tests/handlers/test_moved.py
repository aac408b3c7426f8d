"""Import paths that archives use, and paths that were moved."""

from __future__ import annotations

import importlib

import pytest

from handlers._moved import MOVED

KEPT = {
    "handlers.vision": "VisionHandler",
    "handlers.onnx": "OnnxModel",
    "handlers.llm": "LanguageModel",
    "handlers.intermediate": "send_intermediate_predict_response",
    "handlers.image_classifier": "ImageClassifier",
    "handlers.base": "BaseHandler",
    "handlers.errors": "PredictionException",
}


@pytest.mark.parametrize("old", sorted(MOVED))
def test_a_moved_module_raises_import_error_with_its_new_path(old: str) -> None:
    with pytest.raises(ImportError, match=f"import {MOVED[old]} instead"):
        importlib.import_module(old)
    importlib.import_module(MOVED[old])


@pytest.mark.parametrize("old", sorted(KEPT))
def test_import_paths_of_archives_still_work(old: str) -> None:
    assert hasattr(importlib.import_module(old), KEPT[old])


def test_a_moved_module_is_also_named_when_it_is_imported_from_the_package() -> None:
    with pytest.raises(ImportError, match=r"import handlers\.distributed\.process_group"):
        from handlers import sharding  # noqa: F401
