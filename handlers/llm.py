"""The import path that archives use for ``handlers.builtin.llm``."""

from __future__ import annotations

import sys

from handlers.builtin import llm

sys.modules[__name__] = llm
