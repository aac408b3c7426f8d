"""What the answer to a registration advises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_app.control.admission import Admission
from serve_app.deployments.registrar import _advice
from serve_app.settings import Settings
from serve_app.types import Registration


@pytest.mark.parametrize(
    ("architecture", "handler", "advised"),
    [
        ("GPT2LMHeadModel", None, True),
        ("GPT2LMHeadModel", "llm", False),
        ("BertForTokenClassification", None, False),
    ],
)
def test_a_folder_that_writes_texts_is_told_of_the_engine(
    tmp_path: Path, architecture: str, handler: str | None, advised: bool
) -> None:
    folder = tmp_path / "model_store/writer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "gpt2"}))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    spec = Admission(Settings(home=str(tmp_path))).admit(Registration("writer", handler=handler))
    advice = "It answers as transformers' pipeline; registered with handler=llm it streams, and speaks OpenAI's API"
    assert _advice(spec) == (advice if advised else "")
