"""Tests of ``torchrelay llm-launcher``: its archive, its flags, and a model that it serves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.app import app
from serve_app.cli.commands.llm_launcher import LauncherOptions, build_config, write_archive
from serve_app.model_store.archive import Archive
from serve_app.model_store.cache import unpack
from serve_app.model_store.model_check import check_model
from serve_app.settings import ModelStoreSettings
from tests.support.ports import free_port
from tests.support.requirements import needs_no_package


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "llama"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["llm-launcher", *arguments])
    return result.exit_code, " ".join(re.sub(r"\s+", " ", result.output).split())


@needs_no_package("vllm")
def test_the_archive_serves_a_folder_with_the_given_flags(folder: Path, tmp_path: Path) -> None:
    options = LauncherOptions(
        "llama", str(folder), str(tmp_path / "store"), max_num_seqs=8, max_model_len=200, dtype="bfloat16"
    )
    archive = write_archive(options, gpus=0)
    assert archive == tmp_path / "store" / "llama.launcher.mar"
    write_archive(options, gpus=0)
    unpack(archive, tmp_path / "unpacked", ModelStoreSettings())
    unpacked = Archive.read(tmp_path / "unpacked", archive.name)
    handler, config = unpacked.manifest.handler, check_model(unpacked)
    assert (handler, config.min_workers, config.startup_timeout) == (
        "vllm_handler",
        1,
        1200,
    )
    assert config.raw["handler"]["model_path"] == str(folder)
    sizes = {"page_size": 256, "num_blocks": 8}
    assert config.raw["engine"] == {"name": "transformers", "dtype": "bfloat16", **sizes}


def test_flags_are_translated_as_by_torchserve(folder: Path) -> None:
    config = build_config(LauncherOptions(model_id="hf://tiny/llama", download_dir="cache"), gpus=2)
    assert (config["parallelLevel"], config["deviceType"]) == (2, "gpu")
    assert config["handler"] == {
        "model_path": "tiny/llama",
        "vllm_engine_config": {"download_dir": str(Path("cache").resolve()), "tensor_parallel_size": 2},
    }
    config = build_config(LauncherOptions(model_id=str(folder), engine="trt_llm"), gpus=1)
    assert config["handler"]["kv_cache_config"] == {"free_gpu_memory_fraction": 0.1}
    assert config["engine"]["arguments"] == {"max_batch_size": 4, "dtype": "bfloat16"}
    assert yaml.safe_load(yaml.safe_dump(config)) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--vllm_engine.quantization", "awq"],
            "--vllm_engine.quantization is no flag of the launcher. Write quantization below handler: "
            "vllm_engine_config",
        ),
        (["--workers=3"], "--workers is no flag of the launcher; torchrelay llm-launcher --help lists them"),
        (["--engine", "onnx"], "--engine onnx is not known; it is vllm or trt_llm"),
        (["--model_id", "./nowhere"], "neither an existing folder nor a name of the Hugging Face Hub"),
        (["--model_id", "."], "--model_id . has no config.json; name a Hugging Face folder"),
    ],
)
def test_unknown_flags_and_models_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = run(*arguments)
    assert code == 1 and message in output, output
    assert not list(tmp_path.rglob("*.mar"))


@needs_no_package("tensorrt_llm")
def test_a_missing_tensorrt_llm_is_named_before_the_start(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = run("--engine", "trt_llm", "--model_id", "a/b")
    assert code == 1 and "--engine trt_llm needs tensorrt_llm: pip install tensorrt_llm" in output


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.own_server
def test_a_folder_is_served_with_torchserves_routes(tmp_path: Path) -> None:
    from tests.support.hf_folders import save_byte_llama

    save_byte_llama(tmp_path / "llama")
    ports = [free_port() for _ in range(5)]
    keys = ("inference_address", "management_address", "metrics_address")
    lines = [f"{key}=http://127.0.0.1:{port}" for key, port in zip(keys, ports)]
    lines += [f"grpc_inference_port={ports[3]}", f"grpc_management_port={ports[4]}"]
    (tmp_path / "config.properties").write_text("\n".join(lines))
    flags = ["--model_id", "llama", "--model_name", "tiny", "--disable_token_auth"]
    flags += ["--vllm_engine.max_model_len", "128", "--vllm_engine.max_num_seqs", "4"]
    env = {**os.environ, "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port())}
    command = [sys.executable, "-m", "serve_app.cli", "llm-launcher", *flags]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{ports[0]}/predictions/tiny"
        body = {"prompt": "Once upon", "max_tokens": 8, "temperature": 0}
        answer = wait_for_answer(process, tmp_path / "output", f"{url}/1.0/v1/completions", body)
        text = answer["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == 8
        streamed = httpx.post(url, json=body, timeout=60).text
        assert "".join(re.findall(r'"text": "(.*?)", "tokens"', streamed)) and '"tokens": ' in streamed
        refused = httpx.post(url, json={**body, "max_tokens": 128}, timeout=60)
        assert (refused.status_code, "the limit is 128" in refused.text) == (400, True), refused.text
        assert text
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130), (tmp_path / "output").read_text()


def wait_for_answer(process: subprocess.Popen[bytes], output: Path, url: str, body: Any) -> Any:
    """Return the first answer of the model, once the server and the model are ready."""
    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        try:
            answer = httpx.post(url, json=body, timeout=60)
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code == 200:
            return answer.json()
        time.sleep(0.2)
