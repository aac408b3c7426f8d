"""Archive magika's network, an ONNX graph from its package, as magika.mar."""

import argparse
import importlib.util
import json
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = ("handler.py", "model-config.yaml")


def network_folder() -> Path:
    """Return the folder of the graph in the installed package, without importing the package."""
    package = importlib.util.find_spec("magika")
    if package is None:
        raise SystemExit(
            "the package magika is not installed: .venv/bin/pip install -c constraints.txt magika"
        )
    return Path(package.submodule_search_locations[0], "models", "standard_v3_3")


def archive(store: Path) -> Path:
    model = {
        "modelName": "magika",
        "modelVersion": "3.3",
        "handler": "handler.py",
        "serializedFile": "model.onnx",  # a graph needs no model file
        "configFile": "model-config.yaml",
    }
    partial = store / ".magika.partial"
    with zipfile.ZipFile(partial, "w") as file:
        for name in FILES:
            file.write(HERE / name, name)
        for name in ("model.onnx", "config.min.json"):
            file.write(network_folder() / name, name)
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}, indent=2))
    return partial.replace(store / "magika.mar")  # atomically, so that a server never reads half an archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store
    store.mkdir(parents=True, exist_ok=True)
    print(f"archived as {archive(store)}")
