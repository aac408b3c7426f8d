"""Overfit a recurrent network on a few rhymes, in seconds, and archive it as reading.mar."""

import argparse
import json
import tempfile
import zipfile
from pathlib import Path

import torch
from model import Reader
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
RHYMES = (HERE.parent / "11_text_generation" / "rhymes.txt").read_text().strip().split("\n\n")


def train(steps: int) -> Reader:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = Reader()
    texts = [torch.tensor(list(f"{rhyme}\n\n".encode())) for rhyme in RHYMES]
    batch = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)  # padded with zeros
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        scores = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"loss after {steps} steps: {loss.item():.4f}")
    return model


def archive(model: Reader, store: Path) -> Path:
    manifest = {
        "modelName": "reading",
        "modelVersion": "1.0",
        "handler": "handler.py",
        "modelFile": "model.py",
        "serializedFile": "model.safetensors",
        "configFile": "model-config.yaml",
    }
    store.mkdir(parents=True, exist_ok=True)
    partial = store / ".reading.partial"
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(partial, "w") as file:
        save_file(model.state_dict(), Path(folder, "model.safetensors"))
        file.write(Path(folder, "model.safetensors"), "model.safetensors")
        for name in ("handler.py", "model.py", "model-config.yaml"):
            file.write(HERE / name, name)
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": manifest}, indent=2))
    return partial.replace(store / "reading.mar")  # atomically, so that a server never reads half an archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    print(f"archived as {archive(train(options.steps), options.model_store.resolve())}")
