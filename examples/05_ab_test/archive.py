"""Archive the two versions as headlines-1.mar and headlines-2.mar."""

import argparse
import json
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VERSIONS = {"1.0": ("popular.py", "popular.py:recommend"), "2.0": ("personal.py", "personal.py")}


def archive(version: str, file: str, handler: str, store: Path) -> Path:
    model = {
        "modelName": "headlines",
        "modelVersion": version,
        "handler": handler,
        "configFile": "model-config.yaml",
    }
    partial = store / f".headlines-{version}.partial"
    with zipfile.ZipFile(partial, "w") as contents:
        contents.write(HERE / file, file)
        contents.write(HERE / "model-config.yaml", "model-config.yaml")
        contents.writestr(
            "MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}, indent=2)
        )
    return partial.replace(
        store / f"headlines-{version[0]}.mar"
    )  # atomically, so that a server never reads half an archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store
    store.mkdir(parents=True, exist_ok=True)
    for version, (file, handler) in VERSIONS.items():
        print(f"archived as {archive(version, file, handler, store)}")
