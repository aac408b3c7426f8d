"""What the answer to a registration advises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.control.models import _advice
from serve_app.domain.model import Registration
from serve_app.settings import Settings


@pytest.mark.parametrize(
    ("architecture", "handler", "advised"),
    [
        ("GPT2LMHeadModel", None, True),
        ("GPT2LMHeadModel", "llm", False),
        ("BertForTokenClassification", None, False),
    ],
)
def test_a_text_generation_folder_is_advised_to_use_the_engine(
    tmp_path: Path, architecture: str, handler: str | None, advised: bool
) -> None:
    folder = tmp_path / "model_store/writer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "gpt2"}))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    spec = ArchiveIngestor(Settings(home=str(tmp_path))).ingest(Registration("writer", handler=handler))
    advice = (
        "It answers as transformers' pipeline; registered with handler=llm it streams, and has OpenAI's API"
    )
    assert _advice(spec) == (advice if advised else "")
