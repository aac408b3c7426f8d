"""The fork server: a process with the server's modules, which forks Ray's workers.

A worker that Ray starts imports Ray, Ray Serve and this package, which takes 2 CPU seconds and 110 MiB; torch
takes 1.2 s and 140 MiB more. A fork has these modules at once and shares their pages. The requests come from
fork_worker.py, which Ray runs for each worker, and from the server's first process.

The fork server starts no thread and opens no connection to Ray, so that its forks are safe. It ends with
Ray's raylet. Without it, workers start in Ray's way.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from serve_app.net.fork_client import MODEL_SUFFIX

# Modules that import no Ray, which are imported while Ray's raylet starts; then the others. Ray's workers
# would import some of them themselves: numpy.random takes 5 MiB in each, the controller and the proxies 6,
# pydantic.v1 6, and aiohttp 16 in Ray's agent.
MODULES_WITHOUT_RAY = (
    "aiohttp.web",
    "anyio._backends._asyncio",
    "fastapi",
    "numpy.random",
    "pydantic.v1",
    "uvicorn",
    "uvicorn.lifespan.off",
    "serve_app.control.persistence.database",
    "serve_app.protocols.grpc_app",
    "serve_app.protocols.http_app",
    "serve_app.settings",
)
MODULES = (
    "ray._common.pydantic_compat",
    "ray._private.arrow_serialization",
    "ray._private.authentication.grpc_authentication_client_interceptor",
    "ray._private.authentication.grpc_authentication_server_interceptor",
    "ray._private.workers.default_worker",
    "serve_app.deployments.ray_internals.deploy",
    "serve_app.deployments.ray_internals.haproxy",
    "serve_app.main",
)
MODEL_MODULES = ("torch", "serve_app.runtime.runner")
_NO_JOB = "ffffffff"  # a worker without a job is assigned one by the raylet
_MAX_REQUEST_BYTES = 1 << 20


def main() -> None:
    """Serve the requests for forks until the raylet ends.

    A line of standard input has the path of the socket and the raylet's process id, once they are known.
    """
    preload(MODULES_WITHOUT_RAY)
    path, raylet = sys.stdin.readline().split() or sys.exit()
    # Ray's native library reads these when it is imported.
    os.environ |= {"RAY_RAYLET_PID": raylet, "RAY_JOB_ID": _NO_JOB}
    listeners = [listen(path), listen(path + MODEL_SUFFIX)]  # requests wait for the imports
    with native_random_numbers_unused():
        preload(MODULES)
    from serve_app.deployments.ray_internals.actor_classes import bound_actor_classes

    bound_actor_classes()  # of Ray's own processes, too
    is_model_server = os.fork() == 0
    if is_model_server:
        with native_random_numbers_unused():
            preload(MODEL_MODULES)
    listeners.pop(0 if is_model_server else 1).close()
    serve(listeners[0], os.pidfd_open(int(raylet)))


def preload(modules: Sequence[str]) -> None:
    """Import modules; one that is not installed is left out."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's library starts its threads when it is imported
    gc.disable()
    with missing("pandas"):
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    gc.freeze()  # a collection in a fork would copy the shared pages
    gc.enable()


@contextlib.contextmanager
def missing(name: str) -> Iterator[None]:
    """Let a package appear to be missing in the block.

    Ray Serve imports pandas where it is installed, and that imports pyarrow, which starts a thread and takes
    66 MiB. A handler may import both later.
    """
    is_imported = name in sys.modules
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as an import that failed
    try:
        yield
    finally:
        if not is_imported:
            del sys.modules[name]


class _ActorClassID:
    """The source of the identifiers of actor classes that are defined during the imports."""

    @staticmethod
    def from_random() -> Any:
        from ray._raylet import ActorClassID

        return ActorClassID(os.urandom(ActorClassID.size()))


@contextlib.contextmanager
def native_random_numbers_unused() -> Iterator[None]:
    """Keep Ray's native generator of random numbers unused in the block.

    Forks of a process that has used it draw equal numbers: two workers would have objects of equal
    identifiers, and the second one ends with a failed check.
    """
    actor: Any = importlib.import_module("ray.actor")
    native, actor.ActorClassID = actor.ActorClassID, _ActorClassID
    try:
        yield
    finally:
        actor.ActorClassID = native


def listen(path: str) -> socket.socket:
    """Return a socket that listens at a path."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(128)
    return listener


def serve(listener: socket.socket, raylet: int) -> None:
    """Fork a process for each connection, until the process of the descriptor ``raylet`` ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes ended forks
    while True:
        ready, _, _ = select.select([listener.fileno(), raylet], [], [])
        if raylet in ready:
            return
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            request, files = _receive(connection)
            if os.fork() == 0:
                listener.close()
                os.close(raylet)
                _run_fork(request, files, connection)
            for file in files:
                os.close(file)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and the three standard files that came with it."""
    data, files, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 3)
    while not data.endswith(b"\n"):
        if not (more := connection.recv(_MAX_REQUEST_BYTES)):
            raise ValueError("an incomplete request")
        data += more
    return json.loads(data), files


def _run_fork(request: Mapping[str, Any], files: Sequence[int], connection: socket.socket) -> NoReturn:
    """Become the process that a request describes, and end with it."""
    code = 1
    try:
        _adopt(request, files)
        connection.sendall(b"%d\n" % os.getpid())
        if not request["wait"]:
            connection.close()
        code = _run_program(request["script"], request["arguments"])
        if request["wait"]:
            connection.sendall(b"%d\n" % code)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _adopt(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Take over what a new process has from its parent: group, files, environment and folder."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # of another session
        os.setpgid(0, request["group"])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own ``random`` has a new seed in each fork


def _run_program(script: str, arguments: Sequence[str]) -> int:
    """Run a file, or a module's ``main``, then the exit functions; return the exit code."""
    sys.argv = list(arguments)
    code: Any = 0
    try:
        if script.endswith(".py"):
            sys.path[0] = os.path.dirname(script)
            runpy.run_path(script, run_name="__main__")
        else:
            importlib.import_module(script).main()
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    main()
