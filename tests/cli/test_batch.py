"""`torchrelay batch` on Ray Data: JSONL and Parquet, S3, malformed rows, an interrupted job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from handlers import extras
from tests.support.archives import make_archive
from tests.support.s3_server import running_s3

pytestmark = [pytest.mark.cluster, pytest.mark.own_server]

HANDLER = """
import pathlib
import time
from handlers import PredictionException

seen = 0

def handle(data, context):
    global seen
    answers = []
    for row in data or ():
        value = row["body"]["n"] if isinstance(row["body"], dict) else int(row["body"])
        if value < 0:
            answers.append(PredictionException(f"{value} is negative", 422))
            continue
        gate = pathlib.Path(context.model_yaml_config.get("gate", "/nowhere"))
        seen += 1
        while seen > 6 and gate.exists():
            time.sleep(0.1)
        answers.append({"square": value * value})
    return answers
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "serve_app.cli", "batch", *map(str, arguments)]


def run_batch(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=240, env={**os.environ, **env}
    )


def read_results(folder: Path) -> list[dict[str, Any]]:
    parts = sorted(folder.glob("part-*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


@pytest.fixture
def s3() -> Iterator[tuple[str, Any]]:
    with running_s3("data") as client:
        yield client.meta.endpoint_url, client


@pytest.mark.nightly
def test_lines_become_results_and_an_interrupted_job_continues(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    archive = make_archive(tmp_path, "squares", HANDLER, config={"gate": str(gate), "batchSize": 2})
    lines = [json.dumps({"n": n}) for n in range(10)]
    lines[2], lines[4] = "{broken", '{"n": -4}'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out"
    arguments = (archive, tmp_path / "rows.jsonl", output, "--block-size", 3)

    # The handler waits at its seventh row, after two or three of the four blocks.
    with subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may ignore it
    ) as process:
        deadline = time.monotonic() + 200
        while len(list(output.glob("part-*"))) < 2:
            assert process.poll() is None, process.communicate()[0].decode()
            if time.monotonic() > deadline:
                process.kill()
                raise AssertionError("two blocks are not written")
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        try:
            shown = process.communicate(timeout=60)[0].decode()
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 130, shown
    assert "the same command continues" in shown
    done = {part.name: part.stat().st_mtime_ns for part in output.glob("part-*")}
    assert 2 <= len(done) < 4

    gate.unlink()
    continued = run_batch(*arguments)
    assert continued.returncode == 0, continued.stdout + continued.stderr
    assert "rows are done already" in continued.stdout
    assert all((output / name).stat().st_mtime_ns == changed for name, changed in done.items())
    results = {result["row"]: result for result in read_results(output)}
    assert sorted(results) == list(range(1, 11))
    assert results[10]["prediction"] == {"square": 81}
    assert results[3]["error"]["reason"] == "invalid_input"
    assert results[3]["error"]["message"].startswith("line 3 is not JSON")
    assert results[5]["error"] == {"reason": "handler_rejected", "message": "-4 is negative"}

    other = run_batch(archive, tmp_path / "rows.jsonl", output, "--block-size", 4)
    assert other.returncode == 1
    assert "results of another job (other block_size)" in other.stderr


@pytest.mark.nightly
def test_parquet_from_s3_to_s3(tmp_path: Path, s3: tuple[str, Any]) -> None:
    address, client = s3
    archive = make_archive(tmp_path, "squares", HANDLER)
    parquet.write_table(pyarrow.table({"text": ["2", None, "3"]}), tmp_path / "rows.parquet")
    client.upload_file(str(tmp_path / "rows.parquet"), "data", "rows.parquet")
    client.upload_file(str(archive), "data", "squares.mar")
    options = {"s3": {"client_kwargs": {"endpoint_url": address}}}
    config = {"applications": [{"args": {"store": {"storage_options": options}}}]}
    (tmp_path / "app.yaml").write_text(yaml.safe_dump(config))
    arguments = ("s3://data/squares.mar", "s3://data/rows.parquet", "s3://data/out", "--column", "text")
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    done = run_batch(*arguments, "--config", tmp_path / "app.yaml", **keys)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 rows, 1 errors" in done.stdout
    client.download_file("data", "out/part-00000.parquet", str(tmp_path / "part.parquet"))
    table = parquet.read_table(tmp_path / "part.parquet").to_pylist()
    assert [row["prediction"] and json.loads(row["prediction"])["square"] for row in table] == [4, None, 9]
    assert table[1]["error_message"] == "row 1 has no value 'text'"


@pytest.mark.nightly
def test_a_model_that_does_not_load_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    archive = make_archive(tmp_path, "broken", "raise ValueError('no weights')")
    (tmp_path / "rows.jsonl").write_text("1\n")
    failed = run_batch(archive, tmp_path / "rows.jsonl", tmp_path / "out")
    assert failed.returncode == 1
    assert "ValueError: no weights" in failed.stderr, failed.stderr
    assert "0 of 1 rows are done" in failed.stderr


@pytest.mark.slow
def test_a_missing_package_is_named_with_its_extra() -> None:
    assert extras.install_command("pandas") == "pip install 'torchrelay[batch]'"
