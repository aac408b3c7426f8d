"""A handler ``llm`` for tests of OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import handlers
from handlers.context import Context

HELLO = [{"role": "user", "content": "Hello"}]
TOOL_CALL_MESSAGES = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "2"},
]


class ServedModel:
    """The handler ``llm`` of a folder, on its own event loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        self.entry = handlers.load("llm", folder, {"model": {}})
        self.chunks: list[Any] = []
        self.loop.run_until_complete(self.entry.initialize(self.context("")))

    def context(self, path: str) -> Context:
        engine = {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}
        context = Context("poet", str(self.folder), {"model": {}}, model_yaml_config={"engine": engine})
        context.begin(["id"], [{"url_path": path}], [{}], lambda _index, chunk: self.chunks.append(chunk))
        return context

    def __call__(self, path: str, body: Any = None, **fields: Any) -> Any:
        """Return the response; ``chunks`` holds the streamed chunks before it, ``content_type`` its type."""
        self.chunks.clear()
        context = self.context(path)
        rows = self.entry([{"body": fields if body is None else body}], context)
        [response] = self.loop.run_until_complete(asyncio.wait_for(rows, 60))
        self.content_type = context.get_response_content_type(0)
        if isinstance(response, Exception):
            raise response
        return response

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the objects of a stream's events."""
        last = self(path, stream=True, **fields)
        assert self.content_type == "text/event-stream"
        events = b"".join([*self.chunks, last]).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: ") for event in events[:-1])
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def tokens(self, text: str) -> list[int]:
        return self.entry.instance.tokenizer.encode(text)

    def close(self) -> None:
        self.loop.run_until_complete(self.entry.instance.engine.shutdown())
        self.loop.close()


@contextlib.contextmanager
def serve_copy(source: Path, folder: Path, template: str = "", **generation: Any) -> Iterator[ServedModel]:
    """Serve a copy of a model with another chat template, or generation parameters; its cache ends free."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **generation}))
    model = ServedModel(folder)
    yield model
    assert model.entry.instance.engine.cache_usage == 0, "the cache is free again"
    model.close()
