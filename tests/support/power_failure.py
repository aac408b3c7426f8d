"""The state of a folder after a power failure, by a record of system calls (strace).

The record starts while the folder is empty. A file that is written and not synced loses these bytes; a
rename that is not synced loses the name. The sync of a file keeps its own name and those of the folders
above, as the journals of ext4 and XFS do. Removed files stay removed.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CALLS = (
    "openat,mkdir,mkdirat,write,writev,pwrite64,pwritev,sendfile,"
    "rename,renameat,renameat2,link,linkat,unlink,unlinkat,rmdir,fsync,fdatasync"
)
_PR_SET_PTRACER = 0x59616D61
_LINE = re.compile(r"^(?P<process>\d+) +(?P<call>.*)$")
_CALL = re.compile(r"^(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>.*)$")
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(.*)$")
_DESCRIPTOR = re.compile(r"^\d+<(?P<path>[^>]*)>")
_PATHS = re.compile(r'(?:AT_FDCWD<[^>]*>, |\d+<(?P<folder>[^>]*)>, )?"(?P<path>[^"]*)"')


def record_calls(process: int, record: Path, recorders: list[subprocess.Popen[bytes]]) -> None:
    """Append the calls of a process to ``record``, and its strace to ``recorders``; it runs on return."""
    options = f"-f -y -s 0 -qq -e trace={CALLS} -e signal=none -A -o {record} -p {process}"
    strace = subprocess.Popen(["strace", *options.split()], stderr=subprocess.PIPE)
    recorders.append(strace)
    status = Path(f"/proc/{process}/status")
    while "TracerPid:\t0\n" in status.read_text():
        assert strace.poll() is None, strace.communicate()[1].decode()
        time.sleep(0.01)


def permit_strace() -> None:
    """Permit any process to record this one, which Yama restricts to its ancestors."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))


@dataclass
class _File:
    """The loss of a file: bytes by their range, all of them, or its name."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    all: bool = False
    named: bool = False


def fail_power(record: Path, folder: Path, copy: Path) -> list[str]:
    """Copy a folder as it would be after a power failure now; return the paths that lost something."""
    files = _replay(record, str(folder))
    shutil.copytree(folder, copy, symlinks=True)
    lost = []
    for path, file in files.items():
        target = copy / Path(path).relative_to(folder)
        if not target.exists() or target.is_symlink():
            continue
        if not file.named:
            lost.append(path)
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        elif file.all or file.ranges:
            lost.append(path)
            _lose_bytes(target, file)
    return lost


def _lose_bytes(target: Path, file: _File) -> None:
    content = bytearray(b"" if file.all else target.read_bytes())
    for start, end in sorted(file.ranges, reverse=True):
        if end >= len(content):
            del content[start:]
        else:
            content[start:end] = bytes(end - start)
    target.write_bytes(content)


def _replay(record: Path, folder: str) -> dict[str, _File]:
    files: dict[str, _File] = {}
    for name, arguments, result in _read_calls(record):
        opened = _DESCRIPTOR.match(result if name == "openat" else arguments)
        path = opened["path"].removesuffix(" (deleted)") if opened else ""
        if name.startswith("mkdir"):
            if (made := _paths(arguments)[0]).startswith(folder + "/"):
                files[made] = _File()
        elif name.startswith("unlink") or name == "rmdir":
            files.pop(_paths(arguments)[0], None)
        elif name.startswith(("rename", "link")):
            _rename(files, *_paths(arguments)[:2], folder)
        elif not path.startswith(folder + "/"):
            continue
        elif name == "openat":
            if "O_CREAT" in arguments:
                files.setdefault(path, _File())
            if "O_TRUNC" in arguments:
                files.setdefault(path, _File(named=True)).all = True
        elif name in ("fsync", "fdatasync"):
            _sync(files, path)
        elif name == "pwrite64":
            start = int(arguments.rpartition(", ")[2])
            files.setdefault(path, _File(named=True)).ranges.append((start, start + int(result)))
        else:
            files.setdefault(path, _File(named=True)).all = True
    return files


def _rename(files: dict[str, _File], source: str, target: str, folder: str) -> None:
    if not target.startswith(folder + "/"):
        return
    replaced = files.get(target)
    for path in [path for path in files if path == source or path.startswith(source + "/")]:
        files[target + path.removeprefix(source)] = files.pop(path)
    # A file that replaces another keeps the name: either content is valid.
    files.setdefault(target, _File()).named = replaced is not None and replaced.named


def _sync(files: dict[str, _File], path: str) -> None:
    if path in files:
        files[path].ranges, files[path].all = [], False
    for known, file in files.items():
        entry = known.rpartition("/")[0] == path
        if entry or known == path or path.startswith(known + "/"):
            file.named = True


def _paths(arguments: str) -> list[str]:
    return [f"{m['folder']}/{m['path']}" if m["folder"] else m["path"] for m in _PATHS.finditer(arguments)]


def _read_calls(record: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, arguments and result of each call that succeeded, in the order of their ends."""
    unfinished: dict[str, str] = {}
    for line in record.read_text(errors="replace").splitlines():
        if not (found := _LINE.match(line)):
            continue
        process, call = found["process"], found["call"]
        if call.endswith(" <unfinished ...>"):
            unfinished[process] = call.removesuffix(" <unfinished ...>")
            continue
        if resumed := _RESUMED.match(call):
            call = unfinished.pop(process, "") + resumed[1]
        done = _CALL.match(call)
        if done and not done["result"].startswith("-1"):
            yield done["name"], done["arguments"], done["result"]
