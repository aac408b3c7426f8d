"""Runs of a generation engine on a small cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from handlers import engines

SIZES = {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 48}


def run_with_engine(folder: Path, function: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
    """Return the result of ``function`` with an engine on ``folder``, which is then shut down."""

    async def run() -> Any:
        engine = await engines.start(folder, None, {**SIZES, **options})
        try:
            return await asyncio.wait_for(function(engine), 200)
        finally:
            await engine.shutdown()

    return asyncio.run(run())
