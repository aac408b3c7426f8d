"""`torchrelay tune` on a real server: interrupted and killed, it goes on and removes its models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.archives import archive_language_model, make_archive
from tests.support.hf_folders import make_tokenizer, save_llama
from tests.support.report_checks import ReportPage
from tests.support.server import ROOT, Server

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

HANDLER = """
import time
def handle(data, context):
    if data is None:
        return None
    time.sleep(0.005)  # a batch takes as long as a row
    return ["ok"] * len(data)
"""


class TuneCommand:
    """The command for one model of a server, in a process of its own."""

    def __init__(self, server: Server, folder: Path, *arguments: str) -> None:
        self.server, self.folder = server, folder
        url, management = server.process.inference, server.process.management
        self.command = [sys.executable, "-m", "serve_app.cli", "tune", *arguments, "--output", str(folder)]
        self.command += ["--model-store", str(server.store), "--inference", url, "--management", management]
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"}

    def run(self) -> tuple[int, str]:
        done = subprocess.run(self.command, env=self.env, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    def interrupt(self, number: signal.Signals, trials: int) -> tuple[int, str]:
        """Send a signal while the trial after the first ``trials`` runs."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(self.command, env=self.env, **pipes) as process:
            self.server.wait(lambda: len(self.trials()) >= trials and candidates(self.server))
            process.send_signal(number)
            output, _ = process.communicate(timeout=120)
            return process.returncode, output

    def trials(self) -> list[Any]:
        file = self.folder / "tune-state.json"
        found: list[Any] = json.loads(file.read_text())["trials"] if file.is_file() else []
        return found


def candidates(server: Server) -> list[str]:
    return [m["modelName"] for m in server.client.models() if ".tune-" in m["modelName"]]


def test_a_run_goes_on_after_interruptions_and_removes_its_models(server: Server, tmp_path: Path) -> None:
    archive = make_archive(tmp_path, "steady", HANDLER, files={"x.txt": "x"}, config={"samples": ["x.txt"]})
    assert server.register(archive).status_code == 200
    arguments = [
        "--p99",
        "200ms",
        "--trials",
        "3",
        "--seconds",
        "0.2",
        "--max-workers",
        "1",
        "--try",
        "plain",
    ]
    tune = TuneCommand(server, tmp_path / "out", "steady", *arguments, "--max-batch-size", "4")

    code, output = tune.interrupt(signal.SIGINT, trials=1)
    assert code == 130 and "The same command goes on" in output, output
    assert candidates(server) == [] and not (server.store / ".tune").exists()

    tune.interrupt(signal.SIGKILL, trials=1)
    left = candidates(server)
    assert len(left) == 1 and list((server.store / ".tune").glob("*/*.mar"))
    before = tune.trials()

    code, output = tune.run()
    assert code == 0, output
    assert f"Removed what an interrupted run left: {left[0]}" in output
    assert f"Going on after {len(before)} finished trials" in output
    assert tune.trials()[: len(before)] == before
    assert candidates(server) == [] and not (server.store / ".tune").exists()
    assert server.client.predict("steady", b"x") == b"ok"
    [stats] = server.client.statistics("steady")
    assert stats["inference_stats"]["success"]["count"] <= 3  # the model itself got no load

    config = yaml.safe_load((tune.folder / "model-config.yaml").read_text())
    assert config["batchSize"] > 1 and config["samples"] == ["x.txt"]
    page = ReportPage(tune.folder / "report.html")
    assert f"batch {config['batchSize']}" in page.text and "times the" in page.text
    assert (tune.folder / "trials.csv").is_file() and (tune.folder / "steps.csv").is_file()

    measured = tune.trials()
    code, output = tune.run()  # a finished run is reported again, and measures nothing
    assert code == 0 and tune.trials() == measured

    tune.command[tune.command.index("200ms")] = "1ms"
    tune.command[tune.command.index("3")] = "1"
    code, output = tune.run()
    assert code == 3 and "The trials in" in output and "changed since then: p99. Starting anew" in output, (
        output
    )
    assert "No configuration meets a p99 of 1 ms" in output
    assert not (tune.folder / "model-config.yaml").exists()
    server.client.unregister("steady")


def test_text_generation_has_tokens_by_concurrency(server: Server, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama", max_position_embeddings=64)
    make_tokenizer(64).save_pretrained(folder)
    engine = {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}
    archive = archive_language_model(tmp_path, "poet", folder, **engine)
    (tmp_path / "prompt.json").write_text(json.dumps({"prompt": "a b", "max_tokens": 8, "temperature": 0}))
    arguments = [str(archive), "--p99", "2s", "--trials", "1", "--seconds", "0.2", "--max-workers", "1"]
    tune = TuneCommand(server, tmp_path / "out", *arguments, "--data", str(tmp_path / "prompt.json"))
    code, output = tune.run()
    assert code == 0, output
    page = ReportPage(tune.folder / "report.html")
    rows = page.tables["Tokens per second by concurrency"][1:]
    assert {row[1] for row in rows} == {"1", "2", "4", "8", "16", "32"}
    assert any(float(row[2].replace(",", "")) > 0 for row in rows)
    assert "p99 of the time to first token up to 2000 ms" in page.text
    assert candidates(server) == []
