"""Train the network of the first example and archive it as reasons.mar with an explaining handler."""

import argparse
import sys
import tempfile
from pathlib import Path

from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_packaging import generate_model_archive
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
FIRST = HERE.parent / "01_first_model"
sys.path.insert(0, str(FIRST))

from train import train  # noqa: E402


def archive(store: Path) -> Path:
    """Write reasons.mar atomically to the model store."""
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=store, prefix=".reasons-") as scratch:
        tempfile.tempdir = scratch  # the archiver first empties reasons/ in this folder
        weights = Path(scratch, "digits.safetensors")
        save_file(train()[0].state_dict(), weights)
        generate_model_archive(
            ModelArchiverConfig(
                model_name="reasons",
                version="1.0",
                model_file=str(FIRST / "model.py"),
                serialized_file=str(weights),
                handler=str(HERE / "reasons.py"),
                extra_files=f"{FIRST / 'handler.py'},{FIRST / 'index_to_name.json'},{FIRST / 'three.png'}",
                config_file=str(HERE / "model-config.yaml"),
                export_path=scratch,
            )
        )
        return Path(scratch, "reasons.mar").replace(store / "reasons.mar")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    print(f"archived as {archive(parser.parse_args().model_store.resolve())}")
