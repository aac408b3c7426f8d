"""The folder of a LoRA adapter in an unpacked archive."""

from __future__ import annotations

from pathlib import Path

from serve_app.errors import InvalidArchive

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def find_adapter_folder(directory: Path, source: str) -> Path:
    """Return the folder with an adapter's files: ``directory``, or the only folder in it.

    Raises InvalidArchive for ``source`` where files are missing.
    """
    folders = [directory, *(path for path in directory.iterdir() if path.is_dir() and path.name[0] != ".")]
    found = next((path for path in folders[:2] if (path / CONFIG_FILE).is_file()), None)
    if found is None or (len(folders) > 2 and found is not directory):
        raise InvalidArchive(
            source, f"there is no {CONFIG_FILE}: archive the folder that peft's save_pretrained writes"
        )
    if not (found / WEIGHTS_FILE).is_file():
        raise InvalidArchive(
            source, f"there is no {WEIGHTS_FILE}; pickled weights (adapter_model.bin) are not read"
        )
    return found
