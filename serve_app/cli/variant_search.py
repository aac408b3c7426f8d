"""The parts of ``torchrelay optimize`` and ``torchrelay tune`` that make variants of a model's archive."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from serve_app.cli.api_client import CliClient
from serve_app.cli.terminal import console, fail
from serve_app.model_store.archive import HUGGING_FACE, Archive, Manifest, ModelConfig
from serve_app.model_store.cache import unpack
from serve_app.model_store.model_check import check_model
from serve_app.settings import ModelStoreSettings

VARIANTS = (
    "plain", "bfloat16", "int8", "compile", "compile-bfloat16", "channels-last", "onnx", "onnx-int8",
    "onnx-fp16", "onnx-fused", "onnx-fused-fp16",
    "torchscript", "export", "aotinductor",
)  # fmt: skip
SEARCH_COMMAND = (sys.executable, "-m", "handlers.optimize.search")
_NOISE = 1.05  # two medians of the same model differ by so much


class VariantSearchError(Exception):
    """An error: the search for variants ended without a result; the message has the reason."""


def parse_variants(names: str) -> list[str]:
    """Return the names of a list with commas; exit where one is unknown."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in found if name not in VARIANTS]:
        fail(f"Unknown variant {unknown[0]!r}; the variants are {', '.join(VARIANTS)}.")
    return found


def run_variant_search(job: dict[str, Any]) -> dict[str, Any]:
    """Run ``handlers.optimize.search`` in its own process, which loads torch and the author's code.

    Raises VariantSearchError.
    """
    with tempfile.TemporaryFile("w+") as log, Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=console,
        transient=True,
    ) as bars:  # fmt: skip
        bar = bars.add_task("Loading the model", total=None)
        with subprocess.Popen(
            SEARCH_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process:
            try:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps(job))
                process.stdin.close()
                last: dict[str, Any] = {}
                for line in process.stdout:
                    last = json.loads(line)
                    if "doing" in last:
                        bars.update(bar, description=f"Trying {last['doing']}")
            except BaseException:
                process.kill()
                raise
        log.seek(0)
        tail = "".join(log.readlines()[-20:])
    if "variants" in last:
        return last
    raise VariantSearchError(last.get("error") or f"The search ended with code {process.returncode}:\n{tail}")


def promising_variants(results: Mapping[str, Any]) -> list[str]:
    """Return the variants within the tolerance whose model is not slower than the plain one at every size."""
    plain, *others = results["variants"] or [{"ms": {}}]
    return [
        variant["name"]
        for variant in others
        if not variant["outside"] and any(variant["ms"][n] < plain["ms"][n] * _NOISE for n in plain["ms"])
    ]


def find_archive(
    model: str, store: Path, client: CliClient, version: str | None = None
) -> tuple[Path, list[dict[str, Any]]]:
    """Return the given path, or the archive of the server's model of that name with its versions.

    The version that is served by default, or ``version``, is the first.
    """
    path = Path(model)
    if path.exists():
        return path, []
    if path.suffix or len(path.parts) > 1:
        fail(f"There is no archive {model}.")
    with client:
        served = client.describe(model, version)
    url = served[0]["modelUrl"]
    for candidate in (Path(url.removeprefix("file://")), store / url):
        if candidate.exists():
            return candidate, served
    fail(f"The archive of {model} is {url}, which is not in {store}. Pass the folder with --model-store.")


def read_archive(path: Path, served: list[dict[str, Any]], temporary: Path) -> tuple[Archive, ModelConfig]:
    """Return an archive, unpacked and checked, with its effective configuration.

    ``served`` are the versions of its model on the server, as ``find_archive`` returns them; exit where their
    registration named another handler. Raises RelayError.
    """
    directory = path.resolve() if path.is_dir() else unpack(path, temporary / "archive", ModelStoreSettings())
    archive, task = Archive.read(directory, path.name), None
    if served:  # the registration may have overridden the archive
        archive = archive.with_names(model_name=served[0]["modelName"], version=served[0]["modelVersion"])
        task = served[0].get("task")
    # The model runs on its user's own machine, who trusts the archive's configuration.
    config = check_model(archive, task, archive.config.trusted is True)
    if served and archive.manifest.handler == HUGGING_FACE and "task" not in served[0]:
        name = archive.manifest.model_name
        fail(f"{name} was registered with its own handler. Pass its archive, {path}, instead.")
    return archive, config


def manifest_document(manifest: Manifest, version: str) -> dict[str, Any]:
    """Return the new version's manifest: the archive's, with the values that the server applied."""
    raw: dict[str, Any] = json.loads(json.dumps(dict(manifest.raw)))
    model = raw.setdefault("model", {})
    model |= {"modelName": manifest.model_name, "modelVersion": version, "handler": manifest.handler}
    if manifest.config_file:
        model["configFile"] = manifest.config_file
    return raw


def find_samples(directory: Path, config: ModelConfig, given: list[Path], option: str) -> list[str]:
    """Return the sample requests: the ``given`` files, or the archive's own; exit where there are none."""
    if missing := [file for file in given if not file.is_file()]:
        fail(f"There is no sample {missing[0]}.")
    packed = [directory / name for name in config.samples or ()]
    if config.samples is None and (folder := directory / "samples").is_dir():
        packed = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    if not (files := given or packed):
        fail(
            f"The archive has no sample requests. Pass some with {option} FILE, or pack them under "
            "samples: of its model-config.yaml."
        )
    return [str(file.resolve()) for file in files]


def parse_tolerance(
    config: ModelConfig, rtol: float | None, atol: float | None, cosine: float | None
) -> dict[str, Any]:
    """Return the options of the tolerance where one is given, else those under ``accuracy:``."""
    given = {"rtol": rtol, "atol": atol, "cosine": cosine}
    if any(value is not None for value in given.values()):
        return given
    configured = config.raw.get("accuracy")
    return {key: configured.get(key) for key in given} if isinstance(configured, dict) else {}


def next_version(version: str, taken: Container[str] = ()) -> str:
    """Return the next free version: 1.0 -> 1.1, 2 -> 3; one without a final number gets ".1"."""
    match = re.fullmatch(r"(.*?)(\d+)", version)
    new = f"{match[1]}{int(match[2]) + 1}" if match else f"{version}.1"
    return next_version(new, taken) if new in taken else new
