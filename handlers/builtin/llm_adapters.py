"""The LoRA adapters of the handler ``llm``: those of the archive, and those that are loaded later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from handlers.engines.engine import Engine
from handlers.errors import HandlerLoadError, PredictionException

logger = logging.getLogger(__name__)

HEADER = "adapter"  # of a request of OpenAI's API: the server has parsed the adapter from ``model``


class LoadedAdapters:
    """The adapters of an engine; requests for an adapter that is being loaded wait for it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loading: dict[str, asyncio.Event] = {}
        self._failures: dict[str, str] = {}

    async def load_static(self, folders: Any, root: Path) -> None:
        """Load ``engine.adapters`` of model-config.yaml: folders in the archive by name.

        Raises HandlerLoadError.
        """
        if folders is None:
            return
        if not isinstance(folders, Mapping) or not all(isinstance(item, str) for item in folders.values()):
            raise HandlerLoadError(
                f"model-config.yaml: engine.adapters is {folders!r:.100}; it is {{name: folder-in-archive}}."
            )
        for name, folder in folders.items():
            try:
                await self._engine.load_adapter(str(name), _resolve(root, folder))
            except HandlerLoadError as error:
                raise HandlerLoadError(f"model-config.yaml: engine.adapters.{name}: {error}") from error

    async def load(self, name: str, folder: Awaitable[Path]) -> None:
        """Load an adapter once its folder is there. Raises HandlerLoadError."""
        loaded = self._loading[name] = asyncio.Event()
        try:
            await self._engine.load_adapter(name, await folder)
            self._failures.pop(name, None)
        except BaseException as error:
            self._failures[name] = str(error)
            raise
        finally:
            if self._loading.get(name) is loaded:
                del self._loading[name]
            loaded.set()

    async def unload(self, name: str) -> None:
        self._failures.pop(name, None)
        await self._engine.unload_adapter(name)

    async def wait_for(self, name: str) -> None:
        """Wait while an adapter is being loaded. Raises PredictionException 503 where that has failed."""
        while (loading := self._loading.get(name)) is not None:
            await loading.wait()
        if name in self._failures and name not in self._engine.adapters:
            raise PredictionException(
                f"The adapter {name} could not be loaded here, and is tried again: {self._failures[name]}",
                503,
            )


def _resolve(root: Path, folder: str) -> Path:
    path = (root / folder).resolve()
    if not path.is_relative_to(root.resolve()):
        raise HandlerLoadError(f"{folder} is outside of the archive")
    return path


def select_adapter(context: Any, index: int, model: str) -> str | None:
    """Return the adapter that a request of OpenAI's API names.

    The server's own routes set it in a header, which is empty for the base model. Otherwise it is the last
    part of ``model``, as in ``name:adapter``; other names are the client's own, and are ignored.
    """
    header = context.get_request_header(index, HEADER)
    if isinstance(header, str):
        return header or None
    name, _, rest = model.partition(":")
    adapter = rest.rpartition(":")[2]
    version = ((context.manifest or {}).get("model") or {}).get("modelVersion")
    return adapter if adapter and name == context.model_name and adapter != version else None
