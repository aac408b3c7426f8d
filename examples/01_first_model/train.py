"""Train a small network on handwritten digits in seconds and archive it as digits.mar."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from model import Digits
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_packaging import generate_model_archive
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

HERE = Path(__file__).resolve().parent


def train() -> tuple[Digits, float]:
    """Train the network and return it with its accuracy on test images."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not speed up so small a network
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )

    model = Digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(15):
        for batch in torch.randperm(len(train_images)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(train_images[batch]), train_labels[batch]).backward()
            optimizer.step()

    with torch.inference_mode():
        correct = model(test_images).argmax(dim=1) == test_labels
    return model.eval(), correct.float().mean().item()


def archive(model: Digits, store: Path) -> Path:
    """Write digits.mar atomically to the model store."""
    store.mkdir(parents=True, exist_ok=True)
    os.chdir(HERE)
    with tempfile.TemporaryDirectory(dir=store, prefix=".digits-") as scratch:
        tempfile.tempdir = scratch  # the archiver first empties digits/ in this folder
        weights = Path(scratch, "digits.safetensors")
        save_file(model.state_dict(), weights)
        generate_model_archive(
            ModelArchiverConfig(
                model_name="digits",
                version="1.0",
                model_file="model.py",
                serialized_file=str(weights),
                handler="handler.py",
                extra_files="index_to_name.json,three.png",
                config_file="model-config.yaml",
                export_path=scratch,
            )
        )
        return Path(scratch, "digits.mar").replace(store / "digits.mar")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store.resolve()
    model, accuracy = train()
    print(f"accuracy on images it has not seen: {accuracy:.3f}")
    print(f"archived as {archive(model, store)}")
