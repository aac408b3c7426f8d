"""``torchrelay serve``: a server for one model, from a Python file, weights, an archive or a folder."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from serve_app.cli import progress
from serve_app.cli.api_client import INFERENCE, MANAGEMENT, CliClient, key_file, next_major_version
from serve_app.cli.errors import StartError, require_server
from serve_app.cli.reload_reports import ReloadReports
from serve_app.cli.terminal import console, fail
from serve_app.client import NO_RETRIES, Client, NotFoundError, ServerError, TransportError
from serve_app.domain.schema_example import example_value
from serve_app.model_store.archiver import ArchiverError
from serve_app.model_store.served_target import ServedTarget, read_target

if TYPE_CHECKING:
    from serve_app.cli.dev_server import DevServer

_PORT = 8080
_CHAT_ABOUT_IMAGES = "image_text_to_text"
_LANGUAGE_MODELS = ("llm", "causal_lm", _CHAT_ABOUT_IMAGES)


def serve(
    target: Annotated[
        str,
        typer.Argument(
            help="model.py, model.py:ClassName, a folder, an archive, .onnx, .pt2, .pt or .safetensors, or hf://…"
        ),
    ],
    name: Annotated[str, typer.Option(help="The model's name; by default the stem of the file.")] = "",
    reload: Annotated[
        bool,
        typer.Option("--reload", help="Serve each change of the file; after an error the old code stays."),
    ] = False,
    port: Annotated[
        int, typer.Option(help="The inference port; management and metrics have the two after it.")
    ] = _PORT,
    handler: Annotated[
        str,
        typer.Option(help="The handler of an archive or a folder; language models have llm by default."),
    ] = "",
    model_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="The class of weights that are a state dict.")
    ] = None,
    extra_files: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="More files of the model, as for archive.")
    ] = None,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="Weights and a folder's own code may run as they load.")
    ] = False,
    model_store: Annotated[Path, typer.Option(help="The model store of a server that runs already.")] = Path(
        "model_store"
    ),
    timeout: Annotated[float, typer.Option(help="Seconds until the server must be ready.")] = 300.0,
) -> None:
    """Serve one model in the foreground until Ctrl-C, or register it with the server that runs already.

    The server accepts requests of this machine without keys. Its files are in .torchrelay, and its state is
    new with each start.
    """
    try:
        require_server()
        served = read_target(target, name, model_file, extra_files, trusted, handler)
        if reload and not served.description.class_name:
            raise ArchiverError(f"--reload {target}: only a Python file with a model class can be reloaded")
        from serve_app.cli.dev_server import DevServer  # late: it needs the extra `server`

        dev_server = DevServer(port)
        if (running := dev_server.find_running()) is not None:
            _add(served, running.local, running.management, dev_server.store, reload)
        elif port == _PORT and _is_live():
            _add(served, INFERENCE, MANAGEMENT, model_store, reload)
        else:
            _start(served, dev_server, reload, timeout)
    except (ArchiverError, StartError) as error:
        fail(str(error))


def _start(served: ServedTarget, dev_server: DevServer, reload: bool, timeout: float) -> None:
    """Start a server with the model and stay until it ends."""
    server = dev_server.create()
    report = dev_server.home / "reload.jsonl" if reload else None
    url = served.write(dev_server.store, "1.0", report)
    server.interrupt_on_signals()
    try:
        server.start()
        progress.wait_until_ready(server, console, timeout, show_models=False)
        with server.client(timeout=timeout) as client:
            input_type = _register(client, served, url)
        _print_addresses(served, server.inference, server.management, input_type, str(server.log))
    except KeyboardInterrupt:
        server.stop()
        raise typer.Exit(130) from None
    except ServerError as error:
        server.stop()
        fail("\n".join(filter(None, (str(error), error.detail))))
    with _reports(report):
        code = server.wait()
    if code:
        fail(f"The server ended with code {code}. {server.cause} Its log: {server.log}", code)
    console.print("Torchrelay has stopped.")


def _add(served: ServedTarget, inference: str, management: str, store: Path, reload: bool) -> None:
    """Register the model with a running server; with ``reload`` stay and print the reports."""
    if not store.is_dir():
        raise StartError(f"{store} does not exist; name the running server's model store with --model-store")
    report = store.resolve().parent / f"reload-{served.name}.jsonl" if reload else None
    if report is not None:
        report.unlink(missing_ok=True)
    with CliClient(management, "", inference) as client:
        version = _next_version(client, served.name)
        url = served.write(store, version, report)
        input_type = _register(client, served, url)
        if version != "1.0":
            client.set_default(served.name, version)
    _print_addresses(served, inference, management, input_type, added=version)
    if report is not None:
        with _reports(report), contextlib.suppress(KeyboardInterrupt):
            typer.prompt("Watching; Enter ends it", default="", show_default=False)


def _register(client: Client, served: ServedTarget, url: str) -> str:
    """Register the model and return the media type of its input; empty where it is unknown."""
    progress.register(
        client,
        console,
        url,
        model_name=served.name,
        initial_workers=1,
        handler=served.handler or None,
        trusted=served.trusted or None,
        synchronous=True,
    )
    return client.describe(served.name)[0].get("inputType") or ""


def _is_live() -> bool:
    with Client(INFERENCE, MANAGEMENT, 2, key_file=key_file(MANAGEMENT), retries=NO_RETRIES) as client:
        try:
            return client.live()
        except (TransportError, ServerError):
            return False


def _next_version(client: Client, model: str) -> str:
    """Return 1.0 for a new model, else the next whole number."""
    try:
        return next_major_version(entry["modelVersion"] for entry in client.describe(model))
    except NotFoundError:
        return "1.0"


@contextlib.contextmanager
def _reports(file: Path | None) -> Iterator[None]:
    """Print the reports of reloads during the block."""
    if file is None:
        yield
        return
    reports = ReloadReports(file, console)
    try:
        yield
    finally:
        reports.close()


def _print_addresses(
    served: ServedTarget, inference: str, management: str, input_type: str, log: str = "", added: str = ""
) -> None:
    """Print them; ``added`` is the version that was registered with a server that runs already."""
    url = f"{inference}/predictions/{served.name}"
    end = "Ctrl-C ends it."
    if added:
        end = f"Its default version is now {added}; `torchrelay models` changes or removes it."
    title = f"Torchrelay serves {escape(served.name)}."
    console.print(f"\n[bold green]{title}[/bold green] {end}", highlight=False, soft_wrap=True)
    rows = {"URL": url, "console": f"{management}/ui", "API": f"{inference}/docs", "log": log}
    if served.handler in _LANGUAGE_MODELS:
        rows = {"URL": url, "OpenAI": f"{inference}/v1", **rows}
    for title, value in rows.items():
        if value:
            console.print(f"  {title:<9} {value}", highlight=False, soft_wrap=True)
    console.print("\nTry it:")
    line = f"  {build_curl(url, served.schemas, input_type, served.handler)}\n"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def build_curl(url: str, schemas: Mapping[str, Any] | None, input_type: str = "", handler: str = "") -> str:
    """Return a curl command with an example of the model's input.

    ``input_type`` is its media type where the model has no ``schemas``.
    """
    side = (schemas or {}).get("input", {})
    media_type = side.get("mediaType", input_type)
    body: Any = None
    if handler == _CHAT_ABOUT_IMAGES:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    elif handler in _LANGUAGE_MODELS:
        body = {"prompt": "Once upon a time", "max_new_tokens": 32}
    elif media_type == "application/json" and "schema" in side:
        body = example_value(side["schema"])
    if body is not None:
        return f"curl {url} -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"
    if media_type == "text/plain":
        return f"curl {url} -H 'content-type: text/plain' -d 'some text'"
    return f"curl {url} -T {'IMAGE' if media_type == 'image/*' else 'FILE'}"
