"""LoRA adapters of an asynchronous handler, which are loaded on its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any

from handlers.errors import HandlerLoadError
from serve_app.errors import AdapterRejected, RelayError


class HandlerAdapters:
    """The methods ``load_adapter`` and ``unload_adapter`` of a handler, for callers on other event loops."""

    def __init__(self, handler: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._handler = handler
        self._loop = loop

    async def load_adapter(self, name: str, folder: Awaitable[Path]) -> None:
        """Load an adapter once its ``folder`` is there; requests for it wait meanwhile.

        Raises AdapterRejected, and the RelayError of ``folder``.
        """
        opening = asyncio.ensure_future(folder)
        caller_loop = asyncio.get_running_loop()

        async def wait_for_folder() -> Path:
            opened = asyncio.run_coroutine_threadsafe(_wait(opening), caller_loop)
            return await asyncio.wrap_future(opened)

        try:
            await self._run(self._handler.load_adapter(name, wait_for_folder()))
        except RelayError:
            raise
        except HandlerLoadError as error:
            raise AdapterRejected(name, str(error)) from error
        except Exception as error:
            raise AdapterRejected(name, f"{type(error).__name__}: {error}") from error

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests for it that are under way finish."""
        await self._run(self._handler.unload_adapter(name))

    async def _run(self, method: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(method, self._loop))


async def _wait(opening: asyncio.Future[Path]) -> Path:
    return await opening
