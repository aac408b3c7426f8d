"""A server of models whose handlers the test writes: the inference port's app over real rows and forms."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import shutil
import subprocess
import sys
import threading
import venv
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from parts import ROOT, free_port

from handlers.context import Context
from serve_app import signature
from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane, TableReader
from serve_app.doors.app import App, inference_app
from serve_app.errors import ModelNotFound
from serve_app.runtime.row_form import RowForm
from serve_app.runtime.turn import Turn
from serve_app.settings import InferenceSettings, Settings
from serve_app.signature import Signature
from serve_app.telemetry.metrics import Meters, Sum
from serve_app.types import (
    Access,
    Call,
    Description,
    Figures,
    ModelRef,
    ModelRow,
    ModelSpec,
    ModelStatus,
    Progress,
    Registration,
    Reply,
    ReplyStream,
    Table,
    VersionRow,
)

Handle = Callable[[list[Any], Context], Any]


class Model:
    """A version that runs here: ``handle`` gets each call as a batch of its own."""

    def __init__(self, ref: ModelRef, handle: Handle, form: RowForm) -> None:
        self._ref = ref
        self._handle = handle
        self._form = form

    async def infer(self, call: Call) -> Reply | ReplyStream:
        pieces: list[Any] = []
        turn = Turn(
            Context(self._ref.name, ".", {}),
            [call],
            lambda _, piece: pieces.append(piece),
            self._ref.version,
            self._form,
        )
        try:
            data = turn.open()
            [answer] = turn.close(self._handle(data, turn.context) if data else [])
        except Exception as error:
            [answer] = turn.fail(error)
        if not pieces:
            if isinstance(answer, Reply):
                return answer
            raise answer
        head = pieces[0]

        async def told() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece.body if isinstance(piece, Reply) else piece
            if not isinstance(answer, Reply):
                raise answer
            yield answer.body

        return ReplyStream(Reply(b"", head.content_type, version=head.version), told())


@dataclass
class Models:
    """The table, its models, and a keeper that scales them."""

    reader: TableReader = field(default_factory=lambda: TableReader(Table(1, settled=True)))
    meters: Meters = field(default_factory=Meters)
    asked: list[tuple] = field(default_factory=list)
    _models: dict[ModelRef, Model] = field(default_factory=dict)

    def add(
        self,
        name: str,
        handle: Handle,
        version: str = "1.0",
        *,
        form: str = "values",
        ports: Signature | dict | None = None,
        tensors_only: bool = False,
        replicas: int = 1,
    ) -> None:
        known = signature.read(ports) if isinstance(ports, dict) else ports
        ref = ModelRef(name, version)
        self._models[ref] = Model(ref, handle, RowForm(form, True, known, tensors_only))  # type: ignore[arg-type]
        self.put(ref, VersionRow(version, "ready" if replicas else "stopped", replicas, signature=known))

    def put(self, ref: ModelRef, row: VersionRow) -> None:
        table = self.reader.table
        old = table.models.get(ref.name) or ModelRow(ref.version, {})
        model = ModelRow(old.default, {**old.versions, ref.version: row})
        self.reader.put(Table(table.generation + 1, {**table.models, ref.name: model}, True, table.access))

    def grant(self, access: Access | None) -> None:
        table = self.reader.table
        self.reader.put(Table(table.generation + 1, table.models, True, access))

    def app(self, limit: int = 8 << 20) -> App:
        settings = Settings(inference=InferenceSettings(max_request_size=limit))
        plane = DataPlane(self.reader, self.meters, lambda ref, row: self._models[ref])
        return inference_app(
            plane, settings, self.meters, None, ControlPlane(self, settings, lambda: self.reader.table.access)
        )

    # The keeper, as far as a repository and statistics ask it

    def _spec(self, model: str, version: str | None) -> ModelSpec:
        row = self.reader.table.models.get(model)
        if row is None:
            raise ModelNotFound(model)
        version = version or row.default
        count = row.versions[version].replicas
        return ModelSpec(model, version, f"{model}.mar", "", "", min_workers=count, max_workers=count)

    async def describe(self, model: str, version: str | None) -> Description:
        spec = self._spec(model, version)
        return Description(spec, ModelStatus(), default=True)

    async def versions(self, model: str) -> Sequence[str]:
        self._spec(model, None)
        return list(self.reader.table.models[model].versions)

    async def scale(self, model: str, version: str | None, low: int | None, high: int | None, wait: bool) -> Progress:
        self.asked.append(("scale", model, version, low, high, wait))
        spec = self._spec(model, version)
        if low is not None:
            known = self.reader.table.models[model].versions[spec.version].signature
            self.put(spec.ref, VersionRow(spec.version, "ready" if low else "stopped", low, signature=known))
        return Progress(spec.ref, low or 1, "done")

    async def register(self, registration: Registration) -> Progress:
        self.asked.append(("register", registration.url, registration.model_name, registration.initial_workers))
        self.add(str(registration.model_name), lambda data, context: [1 for _ in data])
        return Progress(ModelRef(str(registration.model_name), "1.0"), 1, "done")

    async def figures(self) -> list[Figures]:
        total = Sum()
        total.put("here", self.meters.report())
        return total.figures()


@pytest.fixture(scope="session")
def kserve_python() -> Path:
    """The interpreter of an environment that has KServe's clients, made once for each list of them.

    Skips where pip reaches no index.
    """
    wanted = ROOT / "tests/clients/kserve.txt"
    kind = f"kserve-{sys.version_info.major}.{sys.version_info.minor}-{sha256(wanted.read_bytes()).hexdigest()[:8]}"
    home = ROOT / ".venv/clients" / kind
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in several processes
        if not (home / "ready").exists():
            shutil.rmtree(home, ignore_errors=True)
            venv.create(home)
            pip = [sys.executable, "-m", "pip", "--python", home, "--disable-pip-version-check", "install", "-q"]
            patient = ["--retries", "10", "--timeout", "60"]
            made = subprocess.run([*pip, *patient, "-r", wanted], capture_output=True, text=True, check=False)
            if made.returncode and "from versions: none" in made.stderr:
                pytest.skip(f"pip reaches no index: {made.stderr[-500:]}")
            assert made.returncode == 0, made.stderr
            (home / "ready").touch()
    return home / "bin/python"


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture
def listening() -> Callable[[Any], contextlib.AbstractContextManager[str]]:
    return _listening


@contextlib.contextmanager
def _listening(app: Any) -> Iterator[str]:
    """The app on a port of its own, in a thread; gives its address without a scheme."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.005)
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
