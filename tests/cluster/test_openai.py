"""OpenAI's client against a language model on a real cluster: chats, streams and structured output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.archives import archive_language_model
from tests.support.hf_folders import CHAT_TEMPLATE, save_byte_llama
from tests.support.server import Server

pytestmark = pytest.mark.cluster

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = save_byte_llama(tmp_path_factory.mktemp("llama"), CHAT_TEMPLATE)
    engine = {"num_blocks": 64, "page_size": 16, "dtype": "float32"}
    archive = archive_language_model(folder.parent, "chat", folder, **engine)
    response = server.register(archive)
    assert response.status_code == 200, response.text
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=120, max_retries=0) as client:
        yield client
    server.management.delete("/models/chat")


def test_a_chat_is_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": "chat", "messages": MESSAGES, "max_tokens": 24, "seed": 1}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.completion_tokens > 4 and len(chunks) > 4


def test_a_json_schema_constrains_the_text(client: openai.OpenAI) -> None:
    schema: Any = {"name": "person", "schema": PERSON, "strict": True}
    completion = client.chat.completions.create(
        model="chat",
        messages=MESSAGES,
        max_tokens=120,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    person = json.loads(completion.choices[0].message.content or "")
    assert completion.choices[0].finish_reason == "stop"
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int) and person["age"] <= 150
