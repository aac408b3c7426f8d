"""Train a perceptron on handwritten digits and archive it as mlp.mar."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from model import MLP
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_packaging import generate_model_archive
from sklearn.datasets import load_digits

HERE = Path(__file__).resolve().parent


def train() -> MLP:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not speed up so small a network
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(10):
        for batch in torch.randperm(len(pixels)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[batch]), labels[batch]).backward()
            optimizer.step()
    return model


def archive(model: MLP, store: Path) -> Path:
    store.mkdir(parents=True, exist_ok=True)
    os.chdir(HERE)
    with tempfile.TemporaryDirectory(dir=store, prefix=".mlp-") as scratch:
        tempfile.tempdir = scratch  # the archiver first empties mlp/ in this folder
        weights = Path(scratch, "mlp.pt")
        torch.save(model.state_dict(), weights)
        generate_model_archive(
            ModelArchiverConfig(
                model_name="mlp",
                version="1.0",
                model_file="model.py",
                serialized_file=str(weights),
                handler="handler.py",
                config_file="model-config.yaml",
                export_path=scratch,
            )
        )
        return Path(scratch, "mlp.mar").replace(store / "mlp.mar")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store.resolve()
    print(f"archived as {archive(train(), store)}")
