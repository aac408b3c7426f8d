"""Archive three versions of one model: 1.0 and 3.0 work, and 2.0 fails one request in ten."""

import argparse
import json
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VERSIONS = {"1.0": "version_1.py", "2.0": "version_2.py", "3.0": "version_3.py"}


def archive(version: str, file: str, store: Path) -> Path:
    model = {"modelName": "estimate", "modelVersion": version, "handler": f"{file}:estimate"}
    partial = store / f".estimate-{version}.partial"
    with zipfile.ZipFile(partial, "w") as archive:
        archive.write(HERE / file, file)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}, indent=2))
    return partial.replace(
        store / f"estimate-{version}.mar"
    )  # atomically, so that a server never reads half an archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store
    store.mkdir(parents=True, exist_ok=True)
    for version, file in VERSIONS.items():
        print(f"archived as {archive(version, file, store)}")
