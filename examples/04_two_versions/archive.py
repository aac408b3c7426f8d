"""Train two versions of one model and archive them as reader-1.mar and reader-2.mar."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_packaging import generate_model_archive
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from version_1 import Linear
from version_2 import Perceptron

HERE = Path(__file__).resolve().parent
VERSIONS = {
    "1.0": (Linear, "version_1.py", "reader-1.mar"),
    "2.0": (Perceptron, "version_2.py", "reader-2.mar"),
}


def train(model: torch.nn.Module) -> float:
    """Train the model and return its accuracy on test images."""
    torch.set_num_threads(1)  # more threads do not speed up so small a network
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    train_pixels, test_pixels, train_labels, test_labels = train_test_split(
        pixels, labels, test_size=0.2, stratify=labels, random_state=0
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(15):
        for batch in torch.randperm(len(train_pixels)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(train_pixels[batch]), train_labels[batch]).backward()
            optimizer.step()
    return (model(test_pixels).argmax(dim=1) == test_labels).float().mean().item()


def archive(model: torch.nn.Module, version: str, model_file: str, target: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".reader-") as scratch:
        tempfile.tempdir = scratch  # the archiver first empties reader/ in this folder
        weights = Path(scratch, "reader.pt")
        torch.save(model.state_dict(), weights)
        generate_model_archive(
            ModelArchiverConfig(
                model_name="reader",
                version=version,
                model_file=model_file,
                serialized_file=str(weights),
                handler="handler.py",
                export_path=scratch,
            )
        )
        return Path(scratch, "reader.mar").replace(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store.resolve()
    store.mkdir(parents=True, exist_ok=True)
    os.chdir(HERE)
    for version, (network, model_file, name) in VERSIONS.items():
        torch.manual_seed(0)
        model = network()
        print(f"version {version}: accuracy on images it has not seen {train(model):.3f}")
        print(f"archived as {archive(model, version, model_file, store / name)}")
