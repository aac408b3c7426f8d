"""Train a network and archive three versions: plain, quantized to a few bits, and with a broken handler."""

import argparse
import json
import zipfile
from pathlib import Path

import torch
from model import Perceptron
from safetensors.torch import save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

HERE = Path(__file__).resolve().parent
BITS = 3  # of each weight of version 2.0


def load_data() -> list[torch.Tensor]:
    """Return the pixels for training and for testing, then their digits."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    return train_test_split(pixels, labels, test_size=0.2, stratify=labels, random_state=0)


def train(pixels: torch.Tensor, labels: torch.Tensor) -> Perceptron:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not speed up so small a network
    model = Perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(15):
        for batch in torch.randperm(len(pixels)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def quantize(model: Perceptron) -> Perceptron:
    """Return a copy with each weight rounded to one of 2 ** BITS - 1 steps."""
    quantized = Perceptron()
    max_step = 2 ** (BITS - 1) - 1
    weights = {}
    for name, weight in model.state_dict().items():
        step = weight.abs().max() / max_step
        weights[name] = (
            (weight / step).round().clamp(-max_step, max_step) * step if weight.dim() > 1 else weight
        )
    quantized.load_state_dict(weights)
    return quantized.eval()


def accuracy(model: Perceptron, pixels: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.inference_mode():
        return (model(pixels).argmax(dim=1) == labels).float().mean().item()


def archive(model: Perceptron, version: str, handler: str, store: Path) -> Path:
    manifest = {
        "modelName": "scribble",
        "modelVersion": version,
        "handler": handler,
        "modelFile": "model.py",
        "serializedFile": "weights.safetensors",
    }
    partial = store / f".scribble-{version}.partial"
    with zipfile.ZipFile(partial, "w") as archive:
        for file in ("model.py", "handler.py", "broken.py"):
            archive.write(HERE / file, file)
        archive.writestr("weights.safetensors", save(model.state_dict()))
        archive.writestr(
            "MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": manifest}, indent=2)
        )
    return partial.replace(
        store / f"scribble-{version}.mar"
    )  # atomically, so that a server never reads half an archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store
    store.mkdir(parents=True, exist_ok=True)
    train_pixels, test_pixels, train_labels, test_labels = load_data()
    trained = train(train_pixels, train_labels)
    quantized = quantize(trained)
    for version, model, handler in (
        ("1.0", trained, "handler.py:Reader"),
        ("2.0", quantized, "handler.py:Reader"),
        ("3.0", trained, "broken.py:NewFormatReader"),
    ):
        share = accuracy(model, test_pixels, test_labels)
        file = archive(model, version, handler, store)
        print(f"{version}: accuracy on images it has not seen {share:.3f}, {file}")
