"""LoRA adapters on a real server: loaded in all replicas, kept when one is killed, and unloaded."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.hf_folders import save_byte_llama
from tests.support.lora_folders import generate, save_adapter
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PROMPT, COUNT = "Roses are red", 8


@pytest.fixture(scope="module")
def adapted(server: Server) -> Iterator[Server]:
    """Register two replicas of a language model, and put an adapter of it into the model store."""
    base = save_byte_llama(server.store / "poet")
    save_adapter(base, server.store / "french")
    parameters = {"url": "poet", "handler": "llm", "initial_workers": 2, "synchronous": "true"}
    answer = server.management.post("/models", params=parameters)
    assert answer.status_code == 200, answer.text
    yield server
    server.management.delete("/models/poet")
    for folder in ("poet", "french", "other"):
        shutil.rmtree(server.store / folder, ignore_errors=True)


def expect_text(server: Server, adapter: str | None) -> str:
    """Return peft's own text; a token is a byte."""
    from transformers import AutoTokenizer

    base = server.store / "poet"
    tokenizer = AutoTokenizer.from_pretrained(base)
    folder = None if adapter is None else server.store / adapter
    tokens = generate(base, folder, tokenizer.encode(PROMPT), COUNT)
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text


def complete(client: openai.OpenAI, model: str) -> str:
    return (
        client.completions.create(model=model, prompt=PROMPT, max_tokens=COUNT, temperature=0).choices[0].text
    )


def test_an_adapter_is_served_until_it_is_removed(adapted: Server) -> None:
    base, french = expect_text(adapted, None), expect_text(adapted, "french")
    assert base != french
    added = adapted.client.add_adapter("poet", "fr", "french")
    assert (added["name"], added["url"]) == ("fr", "french")
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=5) as client:
        # Both replicas have it: requests are distributed between them.
        assert [complete(client, "poet:fr") for _ in range(8)] == [french] * 8
        assert complete(client, "poet") == base
        models = client.models.list().data
        assert [(m.id, getattr(m, "parent", None)) for m in models] == [("poet", None), ("poet:fr", "poet")]
        row = {"prompt": PROMPT, "max_new_tokens": COUNT, "temperature": 0}
        assert adapted.client.predict_json("poet", {**row, "adapter": "fr"})["text"] == french

        before = adapted.pids("poet")
        os.kill(before[0], signal.SIGKILL)
        adapted.wait(
            lambda: len(set(adapted.pids("poet")) - set(before)) == 1 and len(adapted.pids("poet")) == 2
        )
        assert [complete(client, "poet:fr") for _ in range(8)] == [french] * 8

        with pytest.raises(openai.NotFoundError, match=r"no adapter 'nl'\. Its adapters: fr"):
            complete(client, "poet:nl")
        assert adapted.client.remove_adapter("poet", "fr") == 'Adapter "fr" of model "poet" unloaded'
        assert adapted.client.adapters("poet") == []
        with pytest.raises(openai.NotFoundError):
            complete(client, "poet:fr")
        assert complete(client, "poet") == base
    response = httpx.post(f"{adapted.url}/predictions/poet", json={**row, "adapter": "fr"}, timeout=60)
    assert (response.status_code, "no adapter 'fr'" in response.text) == (404, True)


def test_an_adapter_of_another_model_is_refused(adapted: Server, tmp_path: Path) -> None:
    from tests.support.hf_folders import save_llama

    other = save_llama(tmp_path / "other", vocab_size=257, num_hidden_layers=3)
    save_adapter(other, adapted.store / "other")
    response = adapted.management.post("/models/poet/adapters", json={"name": "other", "url": "other"})
    assert response.status_code == 400, response.text
    assert "Adapter other cannot be loaded: adapter_model.safetensors" in response.json()["message"]
    assert adapted.client.adapters("poet") == []
    records = adapted.management.get("/audit", params={"action": "add_adapter"}).json()["records"]
    assert (records[0]["subject"], records[0]["result"]) == ("poet", "failed: adapter_rejected")
