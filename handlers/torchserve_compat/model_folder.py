"""The folder of the model that an archive of TorchServe names: in the archive, on the disk, or on the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handlers.errors import HandlerLoadError


def find_local_folder(directory: Path, path: str) -> Path | None:
    """Return the folder ``path`` of the archive in ``directory``, or elsewhere on the disk; else None."""
    folder = directory / Path(path).expanduser()
    return folder if folder.is_dir() else None


def open_model_folder(directory: Path, path: str, options: Mapping[str, Any], runs_code: bool) -> Path:
    """Return the model's local folder, after a download of a name of the Hugging Face Hub.

    ``options`` may have vLLM's ``download_dir`` and ``revision``. Files of a model that runs no code of its
    own name folders inside of ``directory`` only. Raises HandlerLoadError.
    """
    folder = find_local_folder(directory, path)
    if not runs_code and (folder is None or not folder.resolve().is_relative_to(directory.resolve())):
        raise HandlerLoadError(
            f"model-config.yaml: {path} is not inside of the model, which has no manifest: register the "
            "model with trusted=true, or name it in store.trusted."
        )
    if folder is not None:
        return folder
    repository = path.removeprefix("hf://")
    if Path(path).is_absolute() or repository.count("/") != 1:
        raise HandlerLoadError(
            f"{directory / path}: there is no such folder. Archive the model's folder, or name one of the "
            "Hugging Face Hub (organization/name)."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, _, revision = repository.partition("@")
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision or options.get("revision"),
                cache_dir=options.get("download_dir"),
                ignore_patterns=["original/*", "*.pth", "*.bin", "*.pt"],
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise HandlerLoadError(
            f"{path} is neither a folder of the archive nor available from the Hugging Face Hub ({error}). "
            "Archive the model's folder, or set HF_TOKEN for a model with restricted access."
        ) from error
