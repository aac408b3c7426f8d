"""Train a small network on handwritten digits in seconds and archive it as digits.mar."""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from model import Digits
from safetensors.torch import save_file

from serve_app.model_store.archiver import ArchiveRecipe, make

HERE = Path(__file__).resolve().parent


def train() -> tuple[Digits, float]:
    """Train the network and return it with its accuracy on test images."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not speed up so small a network
    # A row: 8 x 8 pixels of 0 to 16, and the digit.
    rows = torch.from_numpy(np.loadtxt(HERE / "digits.csv.gz", np.float32, delimiter=","))
    rows = rows[torch.randperm(len(rows))]
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].long()
    train_images, test_images = images[:-360], images[-360:]
    train_labels, test_labels = labels[:-360], labels[-360:]

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
        weights = Path(scratch, "digits.safetensors")
        save_file(model.state_dict(), weights)
        recipe = ArchiveRecipe(
            model_name="digits",
            version="1.0",
            model_file="model.py",
            serialized_file=str(weights),
            handler="handler.py",
            extra_files="index_to_name.json,three.png",
            config_file="model-config.yaml",
            export_path=scratch,
        )
        return make(recipe).path.replace(store / "digits.mar")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store.resolve()
    model, accuracy = train()
    print(f"accuracy on images it has not seen: {accuracy:.3f}")
    print(f"archived as {archive(model, store)}")
