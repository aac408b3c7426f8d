"""The figures of a GPU, drawn on whatever is here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.support.requirements import require_onnx_on_gpu

pytestmark = pytest.mark.nightly


SCRIPT = Path(__file__).parents[2] / "examples/14_gpu_throughput/measure.py"
TRAIN = Path(__file__).parents[2] / "examples/10_ner/train.py"
SMALL = ["--layers", "1", "--hidden", "64", "--length", "16", "--batches", "1,2", "--seconds", "0.05"]
VARIANTS = ["PyTorch fp32", "PyTorch fp16", "ONNX Runtime fp32", "ONNX Runtime fp16"]


def measure(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *SMALL, "--folder", str(folder), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def drawn(folder: Path) -> None:
    result = json.loads((folder / "throughput.json").read_text())["rows_per_second"]
    assert list(result) == VARIANTS
    assert all(set(rates) == {"1", "2"} and min(rates.values()) > 0 for rates in result.values())
    for name in ("throughput_by_batch_size", "onnx_against_pytorch", "fp16_against_fp32"):
        with Image.open(folder / f"{name}.png") as picture:
            assert picture.width > 600
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 10  # something stands on it


def test_on_the_cpu(tmp_path: Path) -> None:
    done = measure(tmp_path, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    drawn(tmp_path)
    lines = [line for line in done.stdout.splitlines() if "differ by " in line]
    differences = [float(line.rsplit("differ by ", 1)[1].split()[0]) for line in lines]
    assert len(differences) == 4
    assert max(differences) < 0.01


def test_on_a_trained_model(tmp_path: Path) -> None:
    trained = tmp_path / "entities"
    subprocess.run([sys.executable, str(TRAIN), "--model-store", str(tmp_path)], check=True, timeout=300)
    done = measure(tmp_path, "--device", "cpu", "--model", str(trained))
    assert done.returncode == 0, done.stderr
    drawn(tmp_path)
    assert "NER, entities, 16 tokens, CPU" in (tmp_path / "throughput.json").read_text()
    equal = [float(share) for share in re.findall(r"([\d.]+)% of the labels are equal", done.stdout)]
    assert len(equal) == 4 and equal[0] == 100 and min(equal) > 99

    refused = measure(tmp_path, "--device", "cpu", "--model", str(tmp_path))
    assert refused.returncode == 1
    assert "train.py makes such a folder" in refused.stderr


@pytest.mark.gpu
def test_on_the_gpu(tmp_path: Path) -> None:
    require_onnx_on_gpu()
    done = measure(tmp_path)
    assert done.returncode == 0, done.stderr
    drawn(tmp_path)
