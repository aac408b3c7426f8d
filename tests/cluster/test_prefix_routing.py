"""Prefix-aware routing with two replicas of a language model: each prefix is computed by one of them."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.archives import make_archive
from tests.support.hf_folders import save_byte_llama
from tests.support.server import Server

pytestmark = pytest.mark.cluster

# Adds the process to each response.
HANDLER = """
import os
from handlers.builtin.llm import LanguageModel

class Poet(LanguageModel):
    async def handle(self, data, context):
        for index in range(len(data)):
            context.set_response_header(index, "x-pid", str(os.getpid()))
        return await super().handle(data, context)
"""
CONFIG = {"routing": "prefix", "batchSize": 8, "engine": {"num_blocks": 256, "page_size": 16}}
TEMPLATE = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"


def archive_poet(folder: Path) -> Path:
    """Archive a model with a context of 1,024 tokens and a chat template."""
    model = save_byte_llama(folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    return make_archive(folder, "poet", HANDLER, files=files, config=CONFIG)


@pytest.mark.nightly
def test_a_prefix_reaches_the_replica_that_has_cached_it(server: Server, tmp_path: Path) -> None:
    registered = server.register(archive_poet(tmp_path), initial_workers=2)
    assert registered.status_code == 200, registered.text

    def ask(path: str, body: dict[str, Any]) -> tuple[str, int]:
        """Return the replica's process, and how many tokens of the prompt it had cached."""
        answer = server.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-pid"], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def ask_with(prefix: str, path: str, turn: int) -> tuple[str, int]:
        messages = [{"role": "system", "content": prefix}, {"role": "user", "content": f"Question {turn}?"}]
        body: dict[str, Any] = {"model": "poet", "max_tokens": 2}
        if path.startswith("/v1"):
            return ask(path, body | ({"messages": messages} if "chat" in path else {"prompt": prefix + "?"}))
        return ask(path, {"prompt": f"{prefix} {turn}", "max_new_tokens": 2})

    def is_routed_by_prefix() -> bool:
        """Return whether repeated prompts are cached; a single first replica had a route that ends late."""
        prompts = [f"warm {uuid.uuid4()} ".ljust(300, ".") for _ in range(6)]
        return all(
            ask_with(prompt, "/predictions/poet", 0)[1] < 256
            and ask_with(prompt, "/predictions/poet", 1)[1] >= 256
            for prompt in prompts
        )

    server.wait(is_routed_by_prefix, description="the gateway has the requests")
    for path in ("/predictions/poet", "/predictions/poet/1.0", "/v1/completions", "/v1/chat/completions"):
        homes = defaultdict(set)
        for turn in range(3):
            for number in range(12):
                prefix = f"{path} {number} ".ljust(300, ".")
                pid, cached = ask_with(prefix, path, turn)
                homes[number].add(pid)
                assert cached >= 256 if turn else cached < 256, (path, turn)
        assert all(len(pids) == 1 for pids in homes.values()), "a prefix stays with its replica"
        pids = set.union(*homes.values())
        while len(pids) < 2:  # different prefixes are distributed, by the random ids of the replicas
            pids.add(ask_with(f"{uuid.uuid4()} ".ljust(300, "."), path, 0)[0])
    assert server.management.delete("/models/poet").status_code == 200
