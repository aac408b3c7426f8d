"""Trains a network and archives three versions of it: whole, with weights of a few bits, and with a broken handler."""

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


def data() -> list[torch.Tensor]:
    """Pixels to learn from and pixels to test with, then their digits."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    return train_test_split(pixels, labels, test_size=0.2, stratify=labels, random_state=0)


def train(pixels: torch.Tensor, labels: torch.Tensor) -> Perceptron:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a network gains nothing from more
    model = Perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(15):
        for batch in torch.randperm(len(pixels)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def quantised(model: Perceptron) -> Perceptron:
    """The same network, each weight rounded to one of 2 ** BITS - 1 steps."""
    small = Perceptron()
    most = 2 ** (BITS - 1) - 1
    weights = {}
    for name, weight in model.state_dict().items():
        step = weight.abs().max() / most
        weights[name] = (weight / step).round().clamp(-most, most) * step if weight.dim() > 1 else weight
    small.load_state_dict(weights)
    return small.eval()


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
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": manifest}, indent=2))
    return partial.replace(store / f"scribble-{version}.mar")  # at once: a server never sees half an archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store
    store.mkdir(parents=True, exist_ok=True)
    train_pixels, test_pixels, train_labels, test_labels = data()
    whole = train(train_pixels, train_labels)
    small = quantised(whole)
    for version, model, handler in (
        ("1.0", whole, "handler.py:Reader"),
        ("2.0", small, "handler.py:Reader"),
        ("3.0", whole, "broken.py:Impatient"),
    ):
        right = accuracy(model, test_pixels, test_labels)
        print(f"{version}: accuracy on images it has not seen {right:.3f}, {archive(model, version, handler, store)}")
