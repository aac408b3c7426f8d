"""Archive ``simple``, whose rows are named tensors."""

import argparse
import json
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store
    store.mkdir(parents=True, exist_ok=True)
    model = {
        "modelName": "simple",
        "modelVersion": "1.0",
        "handler": "simple.py:add_and_subtract",
        "configFile": "model-config.yaml",
    }
    partial = store / ".simple.partial"
    with zipfile.ZipFile(partial, "w") as archive:
        for name in ("simple.py", "model-config.yaml"):
            archive.write(HERE / name, name)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}, indent=2))
    print(f"archived as {partial.replace(store / 'simple.mar')}")
