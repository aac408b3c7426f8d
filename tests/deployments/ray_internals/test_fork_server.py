"""The fork server: what a fork has, and that forks differ where new processes would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.deployments.ray_internals import fork_agent
from serve_app.net.fork_client import SOCKET, request_fork, wait_for_socket

pytestmark = pytest.mark.integration

# The server without most of its modules, for the process that it must end with.
_SERVER = """
import os, sys
from serve_app.deployments.ray_internals import fork_server
with fork_server.native_random_numbers_unused():
    fork_server.preload(["ray.dag", "numpy.random", "a_module_that_is_missing"])
listener = fork_server.listen(sys.argv[1])
raylet = os.pidfd_open(int(sys.argv[2]))
print("ready", flush=True)
fork_server.serve(listener, raylet)
"""


class ForkServer:
    """A fork server in a process of its own, which lives as long as a process ``raylet``."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "socket")
        self.raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        command = [sys.executable, "-c", _SERVER, self.path, str(self.raylet.pid)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        for process in (self.raylet, self.process):
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("fork"))
    yield server
    server.close()


def _run(server: ForkServer, folder: Path, program: str, *arguments: str) -> tuple[int, str]:
    """Run a program in a fork; return its exit code and what it wrote to the file that it gets first."""
    script, output = folder / "program.py", folder / "output"
    script.write_text(program)
    environment = {"PATH": os.environ["PATH"], "OWN": "value"}
    pid, connection = request_fork(
        server.path, str(script), [str(script), str(output), *arguments], environment, wait=True
    )
    with connection:
        code = int(connection.recv(16))
    assert pid > 0
    return code, output.read_text() if output.exists() else ""


def test_a_fork_has_the_arguments_environment_and_group_of_its_request(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    program = """
import json, os, sys
values = [sys.argv[2:], os.environ.get("OWN"), os.getpgid(0), os.getcwd(), __name__, "ray.dag" in sys.modules]
open(sys.argv[1], "w").write(json.dumps(values))
"""
    code, output = _run(fork_server, tmp_path, program, "a", "b")
    assert code == 0
    assert json.loads(output) == [["a", "b"], "value", os.getpgid(0), os.getcwd(), "__main__", True]


def test_forks_draw_different_random_numbers(fork_server: ForkServer, tmp_path: Path) -> None:
    """Equal identifiers of objects end the second worker of Ray that warms its object store up."""
    program = """
import random, sys
import numpy, ray
numbers = ray.ObjectID.from_random().hex(), random.random(), numpy.random.random()
open(sys.argv[1], "w").write("\\n".join(map(str, numbers)))
"""
    first, second = (_run(fork_server, tmp_path, program)[1].splitlines() for _ in range(2))
    assert len(first) == 3
    assert not set(first) & set(second)


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("1 / 0", 1), ("", 0)])
def test_the_exit_code_of_a_fork_is_returned(
    fork_server: ForkServer, tmp_path: Path, end: str, code: int
) -> None:
    assert _run(fork_server, tmp_path, f"import sys\n{end}")[0] == code


def test_a_fork_can_wait_for_its_own_child_processes(fork_server: ForkServer, tmp_path: Path) -> None:
    program = "import subprocess, sys; sys.exit(subprocess.run(['sh', '-c', 'exit 5']).returncode)"
    assert _run(fork_server, tmp_path, program)[0] == 5


def test_the_server_ends_with_the_raylet(tmp_path: Path) -> None:
    server = ForkServer(tmp_path)
    server.raylet.kill()
    server.raylet.wait()
    assert server.process.wait(60) == 0
    with pytest.raises(OSError):
        request_fork(server.path, "script.py", ["script.py"], {})
    server.close()


def _start_agent(socket: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start an agent as the raylet does, and return once it runs."""
    script, output = folder / "main.py", folder / "output"
    script.write_text(
        "import sys\n"
        "open(sys.argv[1], 'w').write(f'{\"ray.dag\" in sys.modules}\\n')\n"
        "sys.exit(sys.stdin.read() == 'fail')"
    )
    program = subprocess.Popen(
        [sys.executable, fork_agent.__file__, sys.executable, "-u", str(script), str(output)],
        env={**os.environ, SOCKET: socket},
        stdin=subprocess.PIPE,
    )
    while not (output.exists() and output.read_text().endswith("\n")):
        assert program.poll() is None
        time.sleep(0.05)
    return program


@pytest.mark.parametrize("written", [b"", b"fail"])
def test_an_agent_is_forked_and_ends_with_the_raylet(
    fork_server: ForkServer, tmp_path: Path, written: bytes
) -> None:
    program = _start_agent(fork_server.path, tmp_path)
    assert (tmp_path / "output").read_text() == "True\n", "a fork"
    assert Path(f"/proc/{program.pid}/comm").read_text() == "cat\n"
    program.communicate(written, timeout=60)
    assert program.returncode == 0


def test_an_agent_starts_without_a_fork_server(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    missing.touch()  # what does not listen is not waited for
    program = _start_agent(str(missing), tmp_path)
    assert (tmp_path / "output").read_text() == "False\n"
    program.communicate(b"fail", timeout=60)
    assert program.returncode == 1


def test_the_socket_of_a_starting_fork_server_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    threading.Timer(0.2, path.touch).start()
    wait_for_socket(str(path))
    assert path.exists()


def test_a_worker_starts_without_a_fork_server(tmp_path: Path) -> None:
    """The program that Ray runs for a worker starts Ray's own, which is beside the worker's file."""
    (tmp_path / "setup_worker.py").write_text("import sys; print(sys.argv[1:])")
    worker = [str(tmp_path / "default_worker.py"), "--language=PYTHON"]
    context = {"env_vars": {"TORCHRELAY_PRELOAD": "none"}}
    arguments = [*worker, f"--serialized-runtime-env-context={json.dumps(context)}"]
    for socket in ({}, {"TORCHRELAY_FORK_SERVER": str(tmp_path / "missing")}):
        result = subprocess.run(
            [sys.executable, "-m", "serve_app.deployments.ray_internals.fork_worker", *arguments],
            env={**os.environ, **socket},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout == f"{arguments}\n"


def test_preloading_starts_no_thread_and_every_module_exists() -> None:
    program = """
import os
from serve_app.deployments.ray_internals import fork_server as f
import sys
f.preload(f.MODULES_WITHOUT_RAY)
assert "ray" not in sys.modules, "Ray's native library reads the raylet's process id when it is imported"
with f.native_random_numbers_unused():
    f.preload(f.MODULES)
    f.preload(f.MODEL_MODULES)
missing = [m for m in (*f.MODULES_WITHOUT_RAY, *f.MODULES, *f.MODEL_MODULES) if m not in sys.modules]
assert not missing, missing
assert os.listdir("/proc/self/task") == [str(os.getpid())], "a thread runs"
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
