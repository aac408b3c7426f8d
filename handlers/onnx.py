"""The import path that archives use for ``handlers.onnx_model``."""

from __future__ import annotations

import sys

from handlers import onnx_model

sys.modules[__name__] = onnx_model
