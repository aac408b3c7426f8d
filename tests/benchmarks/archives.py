"""The benchmark's models as TorchServe archives: one file, the same for every server that is compared."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SOURCES = Path(__file__).parent / "models"


class ArchiveFailed(Exception):
    """torch-model-archiver is missing or could not build an archive; the message says which."""


@dataclass(frozen=True)
class Model:
    """One model of the benchmark: how it is archived, asked, and its answer checked."""

    name: str
    body: bytes
    check: Callable[[Any], bool]  # of the decoded JSON answer
    batch_size: int = 1
    handler: str = ""  # a file of ours, or the name of a built-in one
    model_file: str = ""
    content_type: str = "application/json"

    @property
    def archive(self) -> str:
        return f"{self.name}.mar"

    def build(self) -> Any:
        """Return the eager torch module, seeded so that every build has the same weights."""
        import importlib

        import torch

        torch.manual_seed(0)
        module = importlib.import_module(f"tests.benchmarks.models.{Path(self.model_file).stem}")
        (cls,) = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        return cls().eval()

    def batch(self) -> Any:
        """Return a full batch of its request, in the form that the module takes."""
        import torch

        if self.content_type == "application/json":
            return torch.tensor([json.loads(self.body)] * self.batch_size)
        from PIL import Image

        from handlers.builtin.image_classifier import ImageClassifier

        image = ImageClassifier.image_processing(Image.open(io.BytesIO(self.body)))
        return torch.stack([image] * self.batch_size)


def _echo_body() -> bytes:
    body = json.dumps({"text": ""}, separators=(",", ":"))
    return json.dumps({"text": "x" * (100 - len(body))}, separators=(",", ":")).encode()


_ECHO = _echo_body()


def photograph() -> bytes:
    """Return the same JPEG at each call: 640 x 480 pixels, about 100 kB, with the detail of a photograph."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((640, 480), Image.Resampling.BICUBIC), dtype=np.float32)
    grainy = np.clip(smooth + random.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(grainy).save(buffer, "JPEG", quality=86)
    return buffer.getvalue()


MODELS: Mapping[str, Model] = {
    "echo": Model("echo", _ECHO, lambda answer: answer == json.loads(_ECHO), handler="echo.py"),
    "measured_echo": Model(
        "measured_echo", _ECHO, lambda answer: answer == json.loads(_ECHO), handler="measured_echo.py"
    ),
    "tensor_echo": Model(
        "tensor_echo", b'{"x": [1.0]}', lambda answer: answer == {"x": [1.0]}, handler="tensor_echo.py"
    ),
    "mlp": Model(
        "mlp",
        json.dumps([float(i * 7 % 17) for i in range(64)]).encode(),
        lambda answer: (
            len(answer["logits"]) == 10 and answer["logits"][answer["class"]] == max(answer["logits"])
        ),
        batch_size=16,
        handler="mlp_handler.py",
        model_file="mlp.py",
    ),
    "encoder": Model(
        "encoder",
        json.dumps([i * 37 % 1000 for i in range(64)]).encode(),
        lambda answer: len(answer["vector"]) == 8 and answer["threads"] >= 1,
        batch_size=8,
        handler="encoder_handler.py",
        model_file="encoder.py",
    ),
    "sentences": Model(
        "sentences",
        json.dumps([i * 37 % 999 + 1 for i in range(64)]).encode(),
        lambda answer: answer["tokens"] == 64 <= answer["padded"] and len(answer["vector"]) == 8,
        batch_size=8,
        handler="sentences_handler.py",
        model_file="sentences.py",
    ),
    "resnet": Model(
        "resnet",
        photograph(),
        lambda answer: len(answer) == 5 and 0 < sum(answer.values()) <= 1,
        batch_size=8,
        handler="image_classifier",
        model_file="resnet.py",
        content_type="image/jpeg",
    ),
}


def build(folder: Path, names: tuple[str, ...] = tuple(MODELS)) -> dict[str, Path]:
    """Write the named models' archives into ``folder``; returns name -> file.

    Raises ArchiveFailed with the archiver's own words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    archives = {}
    for model in (MODELS[name] for name in names):
        command = [sys.executable, "-m", "model_archiver.model_packaging", "--force"]
        command += ["--model-name", model.name, "--version", "1.0", "--export-path", str(folder)]
        command += [
            "--handler",
            str(_SOURCES / model.handler) if model.handler.endswith(".py") else model.handler,
        ]
        weights = folder / f"{model.name}.pt"
        if model.model_file:
            import torch

            torch.save(model.build().state_dict(), weights)
            command += ["--model-file", str(_SOURCES / model.model_file), "--serialized-file", str(weights)]
        with (
            tempfile.TemporaryDirectory() as scratch
        ):  # the archiver's folder in it is named after the model alone
            done = subprocess.run(
                command, capture_output=True, text=True, env={**os.environ, "TMPDIR": scratch}
            )
        weights.unlink(missing_ok=True)
        archive = folder / model.archive
        if done.returncode or not archive.is_file():
            raise ArchiveFailed(
                f"torch-model-archiver could not build {archive}; is it installed beside {sys.executable} "
                f"(pip install torch-model-archiver)? It said:\n{done.stderr.strip() or done.stdout.strip()}"
            )
        archives[model.name] = archive
    return archives


def configured(archive: Path, folder: Path, word: str, config: str) -> Path:
    """Copy an archive to ``folder`` with ``word`` behind its name and ``config`` as its model-config.yaml."""
    copy = folder / f"{archive.stem}-{word}.mar"
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "MAR-INF/MANIFEST.json":
                manifest = json.loads(content)
                manifest["model"]["configFile"] = "model-config.yaml"
                content = json.dumps(manifest).encode()
            new.writestr(name, content)
        new.writestr("model-config.yaml", config)
    return copy
