"""Build the installation's three archives, and one to register at run time, with torch-model-archiver."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits, load_iris

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"


def nearest_mean(data, scale: float) -> dict[str, torch.Tensor]:
    """Return the state dict of a linear nearest-mean classifier, equal on all machines."""
    means = np.stack([data.data[data.target == label].mean(0) for label in np.unique(data.target)])
    weight, bias = np.round(2 * scale * means, 4), np.round(-scale * (means**2).sum(1), 4)
    return {
        "weight": torch.tensor(weight, dtype=torch.float32),
        "bias": torch.tensor(bias, dtype=torch.float32),
    }


def archive(name: str, version: str, handler: str, store: Path, *options: str) -> None:
    """Write ``name.mar`` to ``store``, or ``name-version.mar`` for a later version."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-W", "ignore", "-m", "model_archiver.model_packaging"]
        command += [
            "--model-name",
            name,
            "--version",
            version,
            "--handler",
            handler,
            "--export-path",
            scratch,
        ]
        subprocess.run([*command, *options], check=True, cwd=MODELS)
        target = f"{name}.mar" if version == "1.0" else f"{name}-{version}.mar"
        shutil.move(f"{scratch}/{name}.mar", store / target)


def build(store: Path) -> None:
    """Write digits.mar, iris.mar and words.mar to ``store``, and words-2.0.mar to ``later`` beside it."""
    later = store.parent / "later"
    for folder in (store, later):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        torch.save(nearest_mean(load_digits(), 0.01), f"{scratch}/digits.pt")
        torch.save(nearest_mean(load_iris(), 1.0), f"{scratch}/iris.pt")
        digits = ("--model-file", "digits_model.py", "--serialized-file", f"{scratch}/digits.pt")
        digits += ("--extra-files", "index_to_name.json", "--config-file", "digits-config.yaml")
        archive("digits", "1.0", "digits_handler.py", store, *digits)
        iris = ("--model-file", "iris_model.py", "--serialized-file", f"{scratch}/iris.pt")
        archive("iris", "1.0", "iris_handler.py", store, *iris)
        archive("words", "1.0", "words_handler.py", store)
        archive("words", "2.0", "words_handler.py", later)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "installation" / "model_store")
