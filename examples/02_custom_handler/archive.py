"""Archive the three handlers. An archive is a zip file with a manifest, so it needs no special tool."""

import argparse
import json
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
HANDLERS = {
    "word_count": "word_count.py:count_words",  # a function of that file
    "square_root": "square_root.py",  # the one class in it
    "countdown": "countdown.py",
}


def archive(name: str, handler: str, store: Path) -> Path:
    model = {"modelName": name, "modelVersion": "1.0", "handler": handler, "configFile": "model-config.yaml"}
    partial = store / f".{name}.partial"
    with zipfile.ZipFile(partial, "w") as file:
        file.write(HERE / f"{name}.py", f"{name}.py")
        file.write(HERE / "model-config.yaml", "model-config.yaml")
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}, indent=2))
    return partial.replace(store / f"{name}.mar")  # atomically, so that a server never reads half an archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store
    store.mkdir(parents=True, exist_ok=True)
    for name, handler in HANDLERS.items():
        print(f"archived as {archive(name, handler, store)}")
