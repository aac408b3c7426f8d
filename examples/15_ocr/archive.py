"""Archive PP-OCR's three networks, ONNX graphs from the package rapidocr, as ocr.mar."""

import argparse
import importlib.util
import json
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = ("handler.py", "lines.py", "characters.py", "model-config.yaml")
NETWORKS = {
    "detector.onnx": "PP-OCRv6_det_small.onnx",
    "direction.onnx": "ch_ppocr_mobile_v2.0_cls_mobile.onnx",
    "recogniser.onnx": "PP-OCRv6_rec_small.onnx",
}


def networks() -> Path:
    """Return the folder of the graphs in the installed package, without importing the package."""
    package = importlib.util.find_spec("rapidocr")
    if package is None:
        raise SystemExit("the package rapidocr is not installed: pip install 'torchrelay[examples]'")
    return Path(package.submodule_search_locations[0], "models")


def archive(store: Path) -> Path:
    model = {
        "modelName": "ocr",
        "modelVersion": "6.0",
        "handler": "handler.py",
        "serializedFile": "detector.onnx",  # BaseHandler loads this one, the handler loads the other two
        "configFile": "model-config.yaml",
    }
    partial = store / ".ocr.partial"
    with zipfile.ZipFile(partial, "w") as file:
        for name in FILES:
            file.write(HERE / name, name)
        for name, network in NETWORKS.items():
            file.write(networks() / network, name)
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}, indent=2))
    return partial.replace(store / "ocr.mar")  # atomically, so that a server never reads half an archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store
    store.mkdir(parents=True, exist_ok=True)
    print(f"archived as {archive(store)}")
