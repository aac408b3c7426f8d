"""Packages of an archive's requirements.txt, installed once on each node for all replicas with the same.

::

    root/<digest>/            the packages: one directory for a replica's sys.path
    root/.locks/<digest>      held while one process installs; shared by every process that uses them
    root/.partial/            work in progress

An environment lies over the server's own packages: what the server has and the requirements allow is
not installed again. What this process has imported already cannot be replaced in it, so another version
of that is refused. An environment that was not used for a week is removed.

pip runs in isolation: in an empty directory, with ``-I`` and an environment of a few variables, so nothing of
the archive and none of the server's secrets reaches it. It installs wheels of the operator's index, unless
``runtime.pip_allow_source_builds`` or ``runtime.pip_allow_options`` allow what can run code.

Ray's runtime_env (``pip``, ``uv``) cannot replace this module: in a virtual environment Ray copies the whole
environment, gigabytes with torch, for each set of requirements, and again in each session. Ray also installs
only when a replica starts, so a registration could neither be refused with pip's message nor show progress.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata as metadata
import json
import logging
import os
import re
import signal
import site
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from serve_app.errors import InstallFailed
from serve_app.model_store.atomic_dir import move_into_place, remove_stale, temporary_dir
from serve_app.runtime import codeartifact
from serve_app.runtime.requirements_file import RejectedLine, parse_requirements
from serve_app.settings import RuntimeSettings

log = logging.getLogger(__name__)

MAX_UNUSED_S = 7 * 24 * 3600.0  # seconds without a user, after which an environment is removed

_LAST_LINES = 15
# The environment of pip: programs and locale, and how the machine reaches its package index.
_VARIABLES = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_IGNORED = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONFIG_FILE")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_OnLine = Callable[[str], None]


class PackageEnvs:
    """The package environments of this node.

    Every method blocks; any number of processes may share a root.
    """

    def __init__(self, root: Path, settings: RuntimeSettings) -> None:
        self._root = root.absolute()
        self._locks, self._partial = self._root / ".locks", self._root / ".partial"
        self._settings = settings
        self._timeout = settings.install_timeout
        for directory in (self._locks, self._partial):
            directory.mkdir(parents=True, exist_ok=True)
        self._loaded = loaded_distributions()  # now: what this process imports later, a replica does not
        self._lock_descriptors: list[int] = []  # their locks mark what this process uses while it lives
        remove_stale(self._partial)
        self._remove_unused()

    def build(
        self, model: str, directory: Path, requirements: str, digest: str, on_line: _OnLine | None = None
    ) -> Path:
        """Install the ``requirements`` file of a model in ``directory``; return the directory of packages.

        ``digest`` is the archive's. ``on_line`` receives the installer's lines, in this thread. Raises
        InstallFailed, and then leaves nothing behind.
        """
        with self._open(model, directory, requirements, digest, on_line) as (packages, _):
            return packages

    def activate(self, model: str, directory: Path, requirements: str, digest: str) -> None:
        """Build the environment where it is missing, and make this process import from it first."""
        with self._open(model, directory, requirements, digest, None) as (packages, lock):
            self._lock_descriptors.append(os.dup(lock.fileno()))  # a lock lives while a copy is open
        for name, theirs, ours in shadowed_distributions(packages, self._loaded):
            log.warning("%s: its %s %s is not used: this process runs %s already", model, name, theirs, ours)
        prepend_to_path(packages)

    @contextlib.contextmanager
    def _open(
        self, model: str, directory: Path, requirements: str, digest: str, on_line: _OnLine | None
    ) -> Iterator[tuple[Path, BinaryIO]]:
        """Yield the built directory and its lock, shared."""
        try:
            text = (directory / requirements).read_text("utf-8", "replace")
        except OSError as error:
            raise InstallFailed(model, f"{requirements} cannot be read: {error.strerror}") from None
        try:
            lines = None if self._settings.pip_allow_options else parse_requirements(text, requirements)
        except RejectedLine as error:
            raise InstallFailed(model, str(error)) from None
        key = _environment_key(text.splitlines() if lines is None else lines, digest, self._settings)
        with (self._locks / key).open("ab") as lock:
            packages = self._root / key
            _lock(lock, fcntl.LOCK_SH)
            if not packages.is_dir():
                _lock(lock, fcntl.LOCK_EX)  # of several that find nothing one installs, and the others wait
                if not packages.is_dir():
                    with temporary_dir(self._partial) as work:
                        file = directory / requirements
                        if lines is not None:
                            file = work / "requirements.txt"
                            file.write_text("".join(f"{line}\n" for line in lines))
                        move_into_place(self._install(model, file, work, on_line), packages)
                _lock(lock, fcntl.LOCK_SH)
            os.utime(lock.fileno())
            yield packages, lock

    def _install(self, model: str, requirements: Path, work: Path, on_line: _OnLine | None) -> Path:
        """Install a file into a virtual environment over this one, and return its packages alone."""
        try:
            venv.EnvBuilder(symlinks=True, with_pip=False).create(work / "venv")
        except (OSError, subprocess.SubprocessError) as error:
            raise InstallFailed(
                model, f"no virtual environment can be made in {self._root}: {error}"
            ) from None
        [packages] = (work / "venv").glob("lib/python*/site-packages")
        below = packages / "_torchrelay_below.pth"
        below.write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in _site_packages()))
        constraints = work / "constraints.txt"
        constraints.write_text(
            "".join(f"{name}=={version}\n" for name, version in sorted(self._loaded.items()))
        )
        empty = work / "empty"
        empty.mkdir()
        # -u: each line reaches on_line at once. -I: neither the directory nor a variable adds a module.
        command = [str(work / "venv/bin/python"), "-u", "-I", "-m", "pip", "--isolated", "install"]
        command += ["--requirement", str(requirements), "--constraint", str(constraints)]
        command += self._authorize_index(model, work)
        command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        command += ["--cache-dir", str(self._root / ".cache"), *_pip_options(self._settings)]
        log.info("%s: installing %s", model, requirements.name)
        if ignored := sorted(name for name in os.environ if name in _IGNORED):
            log.warning("%s: pip does not see %s; set runtime.pip_…", model, ", ".join(ignored))
        # Paths that an allowed option names begin beside the archive's own file.
        cwd = requirements.parent if self._settings.pip_allow_options else empty
        code, last_lines = self._run(command, cwd, _pip_environment(empty), on_line)
        if code != 0:
            raise InstallFailed(model, _failure_message(last_lines, code, self._timeout))
        below.unlink()
        return packages

    def _authorize_index(self, model: str, work: Path) -> list[str]:
        """Return pip's option for an index with a token, which other users must not see in a command."""
        if not codeartifact.is_arn(self._settings.pip_index_url):
            return []
        file = work / "index.txt"
        file.touch(mode=0o600)
        try:
            file.write_text(f"--index-url {codeartifact.authorized_index(self._settings.pip_index_url)}\n")
        except codeartifact.CodeArtifactError as error:
            raise InstallFailed(model, f"runtime.pip_index_url: {error}") from None
        return ["--requirement", str(file)]

    def _run(
        self, command: list[str], directory: Path, environment: dict[str, str], on_line: _OnLine | None
    ) -> tuple[int | None, list[str]]:
        """Return the exit code, None after a timeout, and the last lines."""
        timed_out = threading.Event()
        last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        with subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:

            def end() -> None:
                timed_out.set()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

            timer = threading.Timer(self._timeout, end)
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line := line.rstrip():
                        last_lines.append(line)
                        if on_line is not None:
                            on_line(line)
                code = process.wait()
            finally:
                timer.cancel()
                timer.join()
                if process.poll() is None:
                    end()
        return None if timed_out.is_set() else code, list(last_lines)

    def _remove_unused(self) -> None:
        for path in self._locks.iterdir():
            with contextlib.suppress(OSError), path.open("ab") as lock:
                if path.stat().st_mtime > time.time() - MAX_UNUSED_S:
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while somebody uses it
                packages = self._root / path.name
                with temporary_dir(self._partial) as work, contextlib.suppress(FileNotFoundError):
                    packages.rename(work / "packages")
                path.unlink()


def prepend_to_path(packages: Path) -> None:
    """Put a directory of packages before all others that this process and its children import from.

    The additions of its .pth files apply to this process only.
    """
    before = list(sys.path)
    site.addsitedir(str(packages))
    sys.path[:] = [path for path in sys.path if path not in before] + before
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    importlib.invalidate_caches()


def loaded_distributions() -> dict[str, str]:
    """Return name and version of imported distributions, and of those that Torchrelay requires."""
    places = [f"{path}/" for path in _site_packages()]
    files = {
        file.removeprefix(work)
        for module in list(sys.modules.values())
        for work in places
        if (file := getattr(module, "__file__", None) or "").startswith(work)
    }
    found = dict(_own_requirements())
    for distribution in metadata.distributions():
        record = distribution.read_text("RECORD") or ""
        if any(line.partition(",")[0] in files for line in record.splitlines()):
            found[distribution.metadata["Name"]] = distribution.version
    return found


def _site_packages() -> list[str]:
    return [path for path in sys.path if re.search(r"(site|dist)-packages$", path)]


def shadowed_distributions(packages: Path, ours: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return name, version in ``packages`` and running version of packages imported from elsewhere."""
    folded = {_normalize(name): version for name, version in ours.items()}
    found = [(d.metadata["Name"], d.version) for d in metadata.distributions(path=[str(packages)])]
    return [
        (name, version, folded[_normalize(name)]) for name, version in found if _normalize(name) in folded
    ]


@functools.cache
def _own_requirements() -> dict[str, str]:
    """Return the installed versions of Torchrelay's own requirements."""
    try:
        wanted = metadata.requires("torchrelay") or []
    except metadata.PackageNotFoundError:  # run from its sources
        return {}
    core = {}
    for line in wanted:
        name = re.match(r"[\w.-]+", line)
        if name and "extra ==" not in line:
            with contextlib.suppress(metadata.PackageNotFoundError):
                core[name[0]] = metadata.version(name[0])
    return core


def _lock(file: BinaryIO, kind: int) -> None:
    """Lock a file if the file system can: without locks there is more work, but no error."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, kind)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip_options(settings: RuntimeSettings) -> list[str]:
    """Return pip's options for the sources of packages that the settings allow."""
    options = [] if settings.pip_allow_source_builds else ["--only-binary", ":all:"]
    if settings.pip_index_url == "none":
        options.append("--no-index")
    elif settings.pip_index_url and not codeartifact.is_arn(settings.pip_index_url):
        options += ["--index-url", settings.pip_index_url]
    for url in settings.pip_extra_index_urls:
        options += ["--extra-index-url", url]
    for place in settings.pip_find_links:
        options += ["--find-links", place]
    if settings.pip_require_hashes:
        options.append("--require-hashes")
    return options


def _pip_environment(home: Path) -> dict[str, str]:
    """Return the variables of pip's process, whose home is an empty directory."""
    wanted = {*_VARIABLES, *_PROXIES, *(name.upper() for name in _PROXIES)}
    return {"HOME": str(home), **{name: value for name, value in os.environ.items() if name in wanted}}


def _environment_key(lines: Sequence[str], digest: str, settings: RuntimeSettings) -> str:
    """Return the key of an environment: its requirements, Python, base packages and pip's options."""
    parts = [
        lines,
        digest if settings.pip_allow_options else "",  # a line may name a file of the archive
        sys.implementation.cache_tag,
        sysconfig.get_platform(),
        sorted(_own_requirements().items()),
        _pip_options(settings),
        settings.pip_index_url,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _failure_message(last_lines: list[str], code: int | None, timeout: float) -> str:
    text = "\n".join(last_lines)
    if code is None:
        limit = f"runtime.install_timeout ({timeout:g} s)"
        return f"{text}\nnot done within {limit}; raise it if the packages are large"
    held = re.findall(r"\(constraint\) (\S+)", text)
    if held:
        text += (
            f"\nEvery replica has {', '.join(dict.fromkeys(held))} loaded before the archive's own code, "
            "and a process holds one version of a package: let requirements.txt allow it, or leave it out."
        )
    return text or f"pip ended with code {code}"
