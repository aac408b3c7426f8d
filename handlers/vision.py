"""The import path that archives use for ``handlers.builtin.vision``."""

from __future__ import annotations

import sys

from handlers.builtin import vision

sys.modules[__name__] = vision
