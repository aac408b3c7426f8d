"""The import path that archives use for ``handlers.torchserve_compat.intermediate``."""

from __future__ import annotations

import sys

from handlers.torchserve_compat import intermediate

sys.modules[__name__] = intermediate
