"""The import path that archives use for ``handlers.builtin.image_classifier``."""

from __future__ import annotations

import sys

from handlers.builtin import image_classifier

sys.modules[__name__] = image_classifier
