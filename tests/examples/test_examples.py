"""Every example does what its page says, and so do archives that were made for TorchServe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays")]

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., str]


def register(server: Server, url: str) -> None:
    answer = server.management.post("/models", params={"url": url, "initial_workers": 1})
    assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_01_first_model(server: Server, run: Run) -> None:
    printed = run("01_first_model/train.py", "--model-store", str(server.store))
    assert float(re.search(r"accuracy on images it has not seen: ([\d.]+)", printed)[1]) > 0.95
    assert f"archived as {server.store / 'digits.mar'}" in printed
    register(server, "digits.mar")
    three = (EXAMPLES / "01_first_model/three.png").read_bytes()
    answer = server.http.post("/predictions/digits", content=three)
    assert answer.status_code == 200, answer.text
    digits = answer.json()
    assert next(iter(digits)) == "three"
    page = (EXAMPLES / "01_first_model/README.md").read_text()
    promised = json.loads(re.search(r"three\.png\n(\{.*?\})", page, re.DOTALL)[1])
    assert digits == pytest.approx(promised, abs=1e-3)
    assert server.http.post("/predictions/digits", files={"data": three}).json() == digits
    refused = server.http.post("/predictions/digits", content=b"no image")
    assert refused.status_code == 400
    assert "image" in refused.json()["message"]


@pytest.mark.nightly
def test_02_custom_handler(server: Server, run: Run) -> None:
    run("02_custom_handler/archive.py", "--model-store", str(server.store))
    for name in ("word_count", "square_root", "countdown"):
        register(server, f"{name}.mar")
    counted = server.http.post(
        "/predictions/word_count", content=b"a quick brown fox", headers={"content-type": "text/plain"}
    )
    assert counted.content == b'{\n  "words": 4,\n  "characters": 17\n}'

    numbers: list[object] = [2, -1, "two", 9, 16, 25]
    with ThreadPoolExecutor(len(numbers)) as pool:
        answers = list(
            pool.map(lambda n: server.http.post("/predictions/square_root", json={"number": n}), numbers)
        )
    assert [answer.status_code for answer in answers] == [200, 422, 400, 200, 200, 200]
    assert answers[0].json() == {"root": pytest.approx(2**0.5)}  # its last digit is the processor's
    assert answers[1].json() == {
        "code": 422,
        "type": "InternalServerException",
        "message": "-1 has no real square root",
    }
    assert [answer.json()["root"] for answer in answers[3:]] == [3, 4, 5]

    with server.http.stream("POST", "/predictions/countdown") as answer:
        assert answer.headers["content-type"] == "text/plain"
        pieces = [(piece, time.monotonic()) for piece in answer.iter_raw()]
    assert b"".join(piece for piece, _ in pieces) == b"3\n2\n1\nlift-off\n"
    assert pieces[-1][1] - pieces[0][1] > 0.8, "each as it came, half a second after the one before"


@pytest.mark.nightly
def test_03_batching(server: Server, run: Run) -> None:
    run("03_batching/archive.py", "--model-store", str(server.store))

    def batches(connections: int, requests: int) -> dict[str, int]:
        printed = run("03_batching/load.py", "--connections", str(connections), "--requests", str(requests))
        right = re.search(
            rf"{requests} requests over {connections} connections in .* s; ([\d.]+)% right", printed
        )
        assert float(right[1]) > 95, printed
        return {
            rows: int(count)
            for count, rows in re.findall(r"^ *(\d+) batches of (.*)$", printed, re.MULTILINE)
        }

    assert batches(1, 50) == {"1": 50}
    together = batches(32, 1000)
    assert set(together) - {"1"}, together
    assert sum(together.values()) < 1000
    three = json.loads((EXAMPLES / "04_two_versions/three.json").read_text())
    assert server.http.post("/predictions/mlp", json=three).json() == {"digit": 3}


@pytest.mark.nightly
def test_04_two_versions(server: Server, run: Run) -> None:
    printed = run("04_two_versions/archive.py", "--model-store", str(server.store))
    assert (
        len(
            re.findall(
                r"^version [12]\.0: accuracy on images it has not seen 0\.9\d+$", printed, re.MULTILINE
            )
        )
        == 2
    )
    result = [
        line for line in run("04_two_versions/switch.py").splitlines() if line.startswith("POST /predictions")
    ]
    first, second = '{"digit": 3, "version": "1.0"}', '{"digit": 3, "version": "2.0"}'
    assert result == [
        f"POST /predictions/reader{path}: {answer}"
        for default in (first, second, first)
        for path, answer in (("", default), ("/1.0", first), ("/2.0", second))
    ]


# Archives made for TorchServe

NETWORK = """
from torch import nn

class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)

    def forward(self, rows):
        return self.layer(rows)
"""
HANDLER = """
import json
import torch
from ts.torch_handler.base_handler import BaseHandler

class Handler(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        with open(context.system_properties["model_dir"] + "/unit.json") as file:
            self.unit = json.load(file)["unit"]

    def preprocess(self, data):
        return torch.tensor([row.get("data") or row.get("body") for row in data], dtype=torch.float32)

    def postprocess(self, data):
        return [{"values": values, "unit": self.unit} for values in data.tolist()]
"""


def archive(server: Server, *arguments: str) -> None:
    """Run PyPI's torch-model-archiver, as an author does."""
    tool = Path(sys.executable).with_name("torch-model-archiver")
    done = subprocess.run(
        [str(tool), "--export-path", str(server.store), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=server.home,
        env={**os.environ, "TMPDIR": str(server.home)},  # it empties a folder of the model's name there
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_an_archive_whose_handler_extends_torchserves(server: Server, tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / "handler.py").write_text(HANDLER)
    (tmp_path / "unit.json").write_text('{"unit": "metres"}')
    torch.save({"layer.weight": torch.eye(2) * 2}, tmp_path / "doubles.pt")
    archive(
        server,
        *("--model-name", "doubles", "--version", "1.0", "--handler", str(tmp_path / "handler.py")),
        *("--model-file", str(tmp_path / "network.py"), "--serialized-file", str(tmp_path / "doubles.pt")),
        *("--extra-files", str(tmp_path / "unit.json")),
    )
    register(server, "doubles.mar")
    for path in ("/predictions/doubles", "/predictions/doubles/1.0"):
        answer = server.http.post(path, json=[1, 2.5])
        assert (answer.status_code, answer.json()) == (200, {"values": [2.0, 5.0], "unit": "metres"})


@pytest.mark.nightly
def test_the_image_classifier_on_a_photograph(server: Server, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 7, stride=4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(), torch.nn.Linear(128, 10),
    ).eval()  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is what many archives hold
        torch.jit.script(network).save(tmp_path / "photo.pt")
    names = [f"class {i}" for i in range(10)]
    (tmp_path / "index_to_name.json").write_text(json.dumps(dict(enumerate(names))))
    archive(
        server,
        *("--model-name", "photo", "--version", "1.0", "--handler", "image_classifier"),
        *("--serialized-file", str(tmp_path / "photo.pt")),
        *("--extra-files", str(tmp_path / "index_to_name.json")),
    )
    register(server, "photo.mar")
    china = files("sklearn.datasets") / "images/china.jpg"
    answer = server.http.post("/predictions/photo", content=china.read_bytes())
    assert answer.status_code == 200, answer.text
    with torch.inference_mode():
        likely = network(prepared(china)).softmax(1)[0].topk(5)
    expected = {names[i]: p for p, i in zip(likely.values.tolist(), likely.indices.tolist())}
    assert list(answer.json()) == list(expected)
    assert answer.json() == pytest.approx(expected, abs=1e-3)


def prepared(file: object) -> torch.Tensor:
    """Return a photograph as ImageNet's networks take it: the middle 224 of a shorter side of 256,
    normalised.
    """
    image = Image.open(str(file)).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
    pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), dtype=np.float32) / 255
    normal = (pixels - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    return torch.from_numpy(normal.astype(np.float32)).permute(2, 0, 1).unsqueeze(0)
