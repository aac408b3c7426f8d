"""Registrations: what the answer advises, and what is shown and logged of the URL."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.control.lifecycle_events import EventLog
from serve_app.control.models import ModelService, _advice
from serve_app.control.reconcile_loop import ReconcileLoop
from serve_app.control.reconciler import Reconciler
from serve_app.control.replica_health import HealthTracker
from serve_app.domain.model import Registration
from serve_app.settings import Settings
from serve_app.telemetry.metrics import Meters


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


def test_urls_are_logged_and_recorded_without_credentials(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A registration at start-up that fails: its log line, and the events of its model."""
    settings, events = Settings(home=str(tmp_path)), EventLog()
    (tmp_path / "model_store").mkdir()
    ingestor = ArchiveIngestor(settings)
    idle = Reconciler(lambda action: None, lambda desired: {}, lambda spec, before: None)
    loop = ReconcileLoop(idle, HealthTracker(), ingestor, Meters(), settings)
    unused: Any = None
    models = ModelService(unused, loop, unused, ingestor, unused, events, unused, settings)

    async def load() -> str:
        await models._load(Registration("https://user:secret@127.0.0.1:1/m.mar?X-Amz-Signature=secret"))
        return str(await models.poll_events("m", None, 0, 0.0))

    recorded = asyncio.run(load())
    shown = "https://127.0.0.1:1/m.mar"
    assert shown in recorded and f"{shown} was not loaded" in caplog.text
    assert "secret" not in recorded + caplog.text
