"""Create archives of small models with different weights, all for one pool."""

import argparse
import json
import zipfile
from io import BytesIO
from pathlib import Path

import torch
from rich.progress import track
from torch import nn

HERE = Path(__file__).resolve().parent
INPUTS, HIDDEN, OUTPUTS = 64, 1000, 10
HELPER = f"""
from torch import nn

NAME = "{{name}}"


def build():
    return nn.Sequential(nn.Linear({INPUTS}, {HIDDEN}), nn.ReLU(), nn.Linear({HIDDEN}, {OUTPUTS}))
"""


def create(number: int, folder: Path) -> Path:
    """Write the archive of one model, whose weights depend on its number."""
    name = f"small{number}"
    torch.manual_seed(number)
    weights = BytesIO()
    torch.save(
        nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS)).state_dict(),
        weights,
    )
    model = {"modelName": name, "handler": "h.py", "configFile": "model-config.yaml"}
    files = {
        "MAR-INF/MANIFEST.json": json.dumps({"runtime": "python", "model": model}),
        "h.py": (HERE / "h.py").read_text(),
        "helper.py": HELPER.format(name=name),
        "weights.pt": weights.getvalue(),
        "model-config.yaml": "pool: small\n",
    }
    path = folder / f"{name}.mar"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    options = parser.parse_args()
    store = options.model_store.resolve() / "many"
    store.mkdir(parents=True, exist_ok=True)
    for number in track(range(options.models), "Creating archives"):
        create(number, store)
    print(f"{options.models} archives in {store}")
