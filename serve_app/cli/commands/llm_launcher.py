"""``torchrelay llm-launcher``: a server for one language model, with the flags of TorchServe's launcher."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from handlers import extras
from serve_app.cli import progress
from serve_app.cli.errors import StartError, require_server
from serve_app.cli.terminal import console, fail
from serve_app.cli.torchserve_flags import TorchServeFlags, count_gpus
from serve_app.model_store.archiver import ArchiveRecipe, ArchiverError, make

_MODEL = "meta-llama/Meta-Llama-3.1-8B-Instruct"  # TorchServe's default
_ENGINES = ("vllm", "trt_llm")


@dataclass(frozen=True)
class LauncherOptions:
    """The flags of the launcher; None where they are not given."""

    model_name: str = "model"
    model_id: str = _MODEL
    model_store: str = "model_store"
    engine: str = "vllm"
    startup_timeout: int = 1200
    dtype: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    download_dir: str | None = None
    max_batch_size: int = 4
    free_gpu_memory_fraction: float = 0.1


def llm_launcher(
    context: typer.Context,
    model_id: Annotated[
        str,
        typer.Option("--model_id", help="A Hugging Face folder, or a name of the Hub (organization/name)."),
    ] = _MODEL,
    model_name: Annotated[str, typer.Option("--model_name", help="The model's name in requests.")] = "model",
    model_store: Annotated[
        str, typer.Option("--model_store", help="The folder that the model's archive is written to.")
    ] = "model_store",
    disable_token_auth: Annotated[
        bool, typer.Option("--disable_token_auth", help="Require no token.")
    ] = False,
    engine: Annotated[str, typer.Option("--engine", help="vllm or trt_llm.")] = "vllm",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="The number format; by default that of the weights.")
    ] = None,
    startup_timeout: Annotated[
        int, typer.Option("--startup_timeout", help="Seconds until the model must be loaded.")
    ] = 1200,
    max_num_seqs: Annotated[
        int | None, typer.Option("--vllm_engine.max_num_seqs", help="Requests that run at once.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--vllm_engine.max_model_len", help="Tokens of a prompt and its text.")
    ] = None,
    download_dir: Annotated[
        str | None, typer.Option("--vllm_engine.download_dir", help="The cache of the Hub's files.")
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option("--trt_llm_engine.max_batch_size", help="Requests that run at once.")
    ] = 4,
    free_gpu_memory_fraction: Annotated[
        float,
        typer.Option("--trt_llm_engine.kv_cache_free_gpu_memory_fraction", help="The cache's memory."),
    ] = 0.1,
) -> None:
    """Serve one language model with the flags of TorchServe's ts.llm_launcher; Ctrl-C ends the server.

    Without vLLM, the engine transformers serves the model. The addresses, and tokens, are TorchServe's.
    """
    options = LauncherOptions(
        model_name,
        model_id,
        model_store,
        engine,
        startup_timeout,
        dtype,
        max_num_seqs,
        max_model_len,
        download_dir,
        max_batch_size,
        free_gpu_memory_fraction,
    )
    try:
        if context.args:
            raise StartError(describe_unknown(context.args[0]))
        require_server()
        archive = write_archive(options, count_gpus(os.environ))
        _run(archive, options, disable_token_auth)
    except (ArchiverError, StartError) as error:
        fail(str(error))


def describe_unknown(flag: str) -> str:
    """Return the error for a flag that TorchServe's launcher does not have either."""
    name = flag.partition("=")[0]
    section = "handler: vllm_engine_config"
    if name.startswith("--vllm_engine."):
        return (
            f"{name} is no flag of the launcher. Write {name.removeprefix('--vllm_engine.')} below {section} "
            "in a model-config.yaml, and archive it: torchrelay archive --handler vllm_handler "
            "--config-file model-config.yaml"
        )
    return (
        f"{name} is no flag of the launcher; torchrelay llm-launcher --help lists them. Other keys are "
        "written to a model-config.yaml (torchrelay archive), and those of the server to a config.properties."
    )


def write_archive(options: LauncherOptions, gpus: int) -> Path:
    """Write the archive of the model into the model store. Raises ArchiverError and StartError."""
    if options.engine not in _ENGINES:
        raise StartError(f"--engine {options.engine} is not known; it is {' or '.join(_ENGINES)}")
    if options.engine == "trt_llm" and not extras.is_installed("tensorrt_llm"):
        raise StartError(
            "--engine trt_llm needs tensorrt_llm: pip install tensorrt_llm --extra-index-url "
            "https://pypi.nvidia.com, or leave the flag out"
        )
    store = Path(options.model_store)
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "model-config.yaml"
        config.write_text(yaml.safe_dump(build_config(options, gpus), sort_keys=False))
        recipe = ArchiveRecipe(
            f"{options.model_name}.launcher",  # an archive of that model's own name stays
            "1.0",
            f"{options.engine}_handler",
            config_file=str(config),
            export_path=str(store),
            archive_format="zip-store",
            force=True,
        )
        return make(recipe).path


def build_config(options: LauncherOptions, gpus: int) -> dict[str, Any]:
    """Return the model-config.yaml of the archive, as TorchServe's launcher writes it."""
    config: dict[str, Any] = {
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "maxBatchDelay": 100,
        "responseTimeout": 1200,
        "startupTimeout": options.startup_timeout,
        "deviceType": "gpu" if gpus else "cpu",
        "asyncCommunication": True,
    }
    model = _model_path(options.model_id)
    if options.engine == "trt_llm":
        arguments = {"max_batch_size": options.max_batch_size, "dtype": options.dtype or "bfloat16"}
        config["handler"] = {
            "tokenizer_dir": model,
            "engine_dir": model,
            "kv_cache_config": {"free_gpu_memory_fraction": options.free_gpu_memory_fraction},
        }
        return {**config, "engine": {"name": "tensorrt_llm", "arguments": arguments}}
    download_dir = options.download_dir and str(Path(options.download_dir).resolve())
    arguments = {
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len,
        "download_dir": download_dir,
        "dtype": options.dtype,
        "tensor_parallel_size": gpus if gpus > 1 else None,
    }
    config["handler"] = {"model_path": model, "vllm_engine_config": _without_none(arguments)}
    return {**config, **({"parallelLevel": gpus} if gpus else {})}


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _model_path(model_id: str) -> str:
    """Return a local folder's whole path, or a name of the Hub. Raises StartError."""
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise StartError(f"--model_id {model_id} has no config.json; name a Hugging Face folder")
        return str(folder.resolve())
    name = model_id.removeprefix("hf://")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise StartError(
            f"--model_id {model_id} is neither an existing folder nor a name of the Hugging Face Hub "
            "(organization/name)"
        )
    return name


def _run(archive: Path, options: LauncherOptions, disable_token_auth: bool) -> None:
    """Start the server in the foreground and stay until it ends."""
    from serve_app.cli import torchserve  # late: it needs the extra `server`

    flags = TorchServeFlags(
        model_store=str(archive.parent),
        models=(f"{options.model_name}={archive.name}",),
        no_config_snapshots=True,
        disable_token_auth=disable_token_auth,
    )
    server = torchserve.create_server(flags)
    server.interrupt_on_signals()
    try:
        server.start()
        progress.wait_until_ready(server, console, options.startup_timeout)
        progress.print_addresses(server, console, None, False)
    except KeyboardInterrupt:
        server.stop()
        raise typer.Exit(130) from None
    except StartError:
        server.stop()
        raise
    code = server.wait()
    if code:
        fail(f"The server ended with code {code}. {server.cause} Its log: {server.log}", code)
    console.print("Torchrelay has stopped.")
