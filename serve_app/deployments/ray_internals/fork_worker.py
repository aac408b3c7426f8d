"""The program that Ray runs to start a worker: the fork server forks it, or Ray's own program starts it.

Ray runs this file by its path in place of its ``setup_worker.py``. A worker starts in Ray's way if it needs
another interpreter, has packages of its own, or there is no fork server.
"""

from __future__ import annotations

import json
import os
import sys

from serve_app.net.fork_client import MODEL_SUFFIX, SOCKET, request_fork

PRELOAD = "TORCHRELAY_PRELOAD"  # in a worker's runtime environment: "model" for torch, "none" for no fork
# Ray's variable with the name of a function that runs before the worker's main loop.
SETUP_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
MODEL_ENVIRONMENT = {PRELOAD: "model", SETUP_HOOK: "serve_app.deployments.ray_internals.main_thread.install"}
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def main() -> None:
    """Start the worker that the arguments describe, and end once it runs."""
    arguments = sys.argv[1:]
    contexts = [a.removeprefix(_CONTEXT) for a in arguments if a.startswith(_CONTEXT)]
    context = json.loads(contexts[0]) if contexts else {}
    variables = context.get("env_vars") or {}
    path = os.environ.get(SOCKET)
    if path and f"{_LANGUAGE}PYTHON" in arguments and _is_plain(context):
        worker = [a for a in arguments if not a.startswith((_CONTEXT, _LANGUAGE))]
        suffix = MODEL_SUFFIX if variables else ""
        try:
            request_fork(path + suffix, worker[0], worker, {**os.environ, **variables})
            return
        except OSError as error:
            print(f"A worker starts without the fork server: {error}", file=sys.stderr)
    start_as_ray_does(arguments)


def _is_plain(context: dict[str, object]) -> bool:
    """Return whether a runtime environment needs nothing but modules that are imported."""
    return (
        not context.get("command_prefix")
        and not context.get("override_worker_entrypoint")
        and context.get("py_executable") in (None, sys.executable)
        and (context.get("env_vars") or {}) in ({}, MODEL_ENVIRONMENT)
    )


def start_as_ray_does(arguments: list[str]) -> None:
    """Replace this program by Ray's; the first of the arguments is a file beside it."""
    program = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, program, *arguments])


if __name__ == "__main__":
    main()
