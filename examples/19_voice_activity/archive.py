"""Archive silero-vad's network as voice.mar (ONNX) and as voice-script.mar (TorchScript)."""

import argparse
import importlib.util
import json
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Archive -> version of the model, file in the archive, file of the package.
ARCHIVES = {
    "voice.mar": ("1.0", "voice.onnx", "silero_vad.onnx"),
    "voice-script.mar": ("2.0", "voice.pt", "silero_vad.jit"),
}


def networks() -> Path:
    """Return the folder of the networks in the installed package, without importing the package."""
    package = importlib.util.find_spec("silero_vad")
    if package is None:
        raise SystemExit(
            "the package silero-vad is not installed: .venv/bin/pip install -c constraints.txt silero-vad"
        )
    return Path(package.submodule_search_locations[0], "data")


def archive(store: Path, name: str) -> Path:
    version, file, network = ARCHIVES[name]
    model = {
        "modelName": "voice",
        "modelVersion": version,
        "handler": "handler.py",
        "serializedFile": file,
        "configFile": "model-config.yaml",
    }
    partial = store / f".{name}.partial"
    with zipfile.ZipFile(partial, "w") as packed:
        for file_name in ("handler.py", "model-config.yaml"):
            packed.write(HERE / file_name, file_name)
        packed.write(networks() / network, file)
        packed.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}, indent=2))
    return partial.replace(store / name)  # atomically, so that a server never reads half an archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store
    store.mkdir(parents=True, exist_ok=True)
    for name in ARCHIVES:
        print(f"archived as {archive(store, name)}")
