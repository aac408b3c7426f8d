"""Archive the three networks of examples/15_ocr as three models, and the workflow that connects them."""

import argparse
import json
import runpy
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OCR = HERE.parent / "15_ocr"
MODELS = {  # handler, version, graph and configuration
    "ocr_detector": ("detector.py", "6.0", "detector.onnx", {"batchSize": 4}),
    "ocr_direction": ("direction.py", "2.0", "direction.onnx", {"batchSize": 32}),
    "ocr_reader": ("reader.py", "6.0", "recogniser.onnx", {"batchSize": 8}),
}


def archive_model(store: Path, name: str, graphs: dict[str, Path]) -> Path:
    handler, version, graph, config = MODELS[name]
    manifest = {
        "modelName": name,
        "modelVersion": version,
        "handler": handler,
        "serializedFile": graph,
        "configFile": "model-config.yaml",
    }
    partial = store / f".{name}.partial"
    with zipfile.ZipFile(partial, "w") as file:
        file.write(HERE / handler, handler)
        file.write(OCR / "lines.py", "lines.py")
        file.write(OCR / "characters.py", "characters.py")
        file.write(graphs[graph], graph)
        file.writestr("model-config.yaml", json.dumps({"threads": "auto", **config}))  # JSON is YAML too
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": manifest}, indent=2))
    return partial.replace(store / f"{name}.mar")  # atomically, so that a server never reads half an archive


def archive_workflow(store: Path) -> Path:
    manifest = {"workflowName": "receipts", "specFile": "workflow.yaml", "handler": "steps.py"}
    partial = store / ".receipts.partial"
    with zipfile.ZipFile(partial, "w") as file:
        for path in (HERE / "workflow.yaml", HERE / "steps.py", OCR / "lines.py"):
            file.write(path, path.name)
        file.writestr("WAR-INF/MANIFEST.json", json.dumps({"workflow": manifest}, indent=2))
    return partial.replace(store / "receipts.war")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store
    store.mkdir(parents=True, exist_ok=True)
    ocr = runpy.run_path(str(OCR / "archive.py"))
    graphs = {name: ocr["networks"]() / network for name, network in ocr["NETWORKS"].items()}
    for archive in (*(archive_model(store, name, graphs) for name in MODELS), archive_workflow(store)):
        print(f"archived as {archive}")
