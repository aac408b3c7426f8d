"""Other users of the server's machine, code of a handler that reads secrets, and forged log lines."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import httpx
import psutil

from tests.security.attack import Outcome, Target, attack
from tests.support.archives import make_archive

_READ_ENVIRONMENT = """
import json, os
def handle(data, context):
    if data is None:
        return None
    seen = {"environ": sorted(os.environ)}
    with open("/proc/self/environ", "rb") as file:
        names = [entry.partition(b"=")[0].decode(errors="replace") for entry in file.read().split(b"\\0")]
    seen["proc"] = sorted(name for name in names if name)
    return [json.dumps(seen)] * len(data)
"""
for _name in ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "RAY_REDIS_PASSWORD"):
    os.environ.setdefault(_name, "secret")  # the server inherits them
SECRETS = ("TORCHRELAY_TOKEN", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "RAY_REDIS_PASSWORD", "PGPASSWORD")


def _open_to_others(root: Path) -> list[Path]:
    """Return what other users can read or connect to under ``root``, if they can reach ``root`` itself."""
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        here = Path(folder)
        if not here.lstat().st_mode & 0o011:
            names.clear()  # nobody else can enter it
            continue
        for name in files:
            status = (here / name).lstat()
            wanted = 0o022 if stat.S_ISSOCK(status.st_mode) else 0o044
            if not stat.S_ISLNK(status.st_mode) and status.st_mode & wanted:
                found.append(here / name)
    return found


@attack("local_users", "another user reads state and logs", "19 files readable")
def read_files(target: Target) -> Outcome:
    found = _open_to_others(target.home / "state") + _open_to_others(target.home / "logs")
    return Outcome(f"{len(found)} files readable", not found)


@attack(
    "local_users",
    "another user reads Ray's logs and connects to its and HAProxy's sockets",
    "108 files, 1 socket, umask 0022",
)
def read_sessions(target: Target) -> Outcome:
    pids = {process.pid for process in target.processes()}
    files, sockets = set(), set()
    for connection in psutil.net_connections("unix"):
        path = Path(connection.laddr or "/")
        if connection.pid in pids and path.is_relative_to("/tmp"):
            siblings = path.parent.iterdir()  # HAProxy renames its socket after binding
            sockets.update(other for other in siblings if other.is_socket() and _is_reachable(other))
    for process in target.processes():
        try:
            opened = [Path(file.path) for file in process.open_files()]
        except psutil.Error:
            continue
        files.update(
            path for path in opened if path.is_relative_to("/tmp") and path.is_file() and _is_reachable(path)
        )
    umasks = {_read_umask(pid) for pid in pids} - {""}
    text = f"{len(files)} files, {len(sockets)} sockets, umask {', '.join(sorted(umasks))}"
    return Outcome(text, not files and not sockets and umasks == {"0077"})


def _read_umask(pid: int) -> str:
    """Return a process's umask, in octal digits; empty where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next(line.split()[1] for line in lines if line.startswith("Umask"))


def _is_reachable(path: Path) -> bool:
    """Return whether other users may enter the folders of ``path`` below /tmp, and read or connect to it."""
    mode = path.stat().st_mode
    wanted = 0o022 if stat.S_ISSOCK(mode) else 0o044
    folders = [folder for folder in path.parents if folder.is_relative_to("/tmp") and folder != Path("/tmp")]
    return bool(mode & wanted) and all(folder.stat().st_mode & 0o011 for folder in folders)


@attack(
    "local_users", "a handler reads the server's secrets in its environment", "environ: 3 of 3, proc: 3 of 3"
)
def read_environment(target: Target) -> Outcome:
    archive = make_archive(target.home / "model_store", "environment", _READ_ENVIRONMENT)
    registered = target.manage(
        "POST", f"/models?url={archive.name}&initial_workers=1&synchronous=true"
    ).status_code
    assert registered == 200, registered
    try:
        seen = json.loads(target.infer("environment").text)
    finally:
        target.manage("DELETE", "/models/environment")
        archive.unlink()
    leaked = {place: [name for name in SECRETS if name in names] for place, names in seen.items()}
    present = [name for name in SECRETS if name in os.environ]
    text = ", ".join(f"{place}: {len(names)} of {len(present)}" for place, names in leaked.items())
    return Outcome(text, not any(leaked.values()))


@attack("local_users", "a client forges lines and addresses in the access log", "2 forged lines, 2 addresses")
def forge_lines(target: Target) -> Outcome:
    log = target.home / "logs" / "access_log.log"
    line = '192.0.2.9:1 "GET /models HTTP/1.1" 200 0'
    path = f'/predictions/echo" 200 1\n2026-01-01T00:00:00,000 - /{line}\x1b[2K'
    encoded = "".join(f"%{byte:02x}" for byte in path.encode()[1:])
    httpx.get(f"{target.inference}/{encoded}", headers=target.headers())
    httpx.get(
        f"{target.management}/models?forged",
        headers={**target.headers("ops"), "x-forwarded-for": "192.0.2.7"},
    )
    httpx.post(
        f"{target.inference}/predictions/echo",
        headers={**target.headers(), "x-forwarded-for": "192.0.2.7"},
        content=b"x",
    )
    time.sleep(1.5)  # lines are written within half a second
    lines = log.read_text().split("\n")
    forged = [kept for kept in lines if "\x1b" in kept or kept.count('"') != 2 * bool(kept)]
    addresses = [kept for kept in lines if "/192.0.2.7" in kept]
    return Outcome(f"{len(forged)} forged lines, {len(addresses)} forged addresses", not forged + addresses)


@attack("local_users", "changes and refused attempts leave no trace of their author", "0 of 3 recorded")
def hide_changes(target: Target) -> Outcome:
    target.manage("PUT", "/models/echo?min_worker=1&max_worker=2")
    target.manage("PUT", "/models/echo?min_worker=1&max_worker=1")
    httpx.delete(f"{target.management}/models/echo", headers=target.headers("alpha"))
    deadline, found = time.monotonic() + 10, 0
    while found < 3 and time.monotonic() < deadline:
        page = target.manage("GET", "/audit?limit=1000")
        records = page.json()["records"] if page.status_code == 200 else []
        seen = {(record["actor"], record["action"], record["result"]) for record in records}
        scaled = sum(r["action"] == "scale" and r["actor"] == "ops" and bool(r["after"]) for r in records)
        found = min(scaled, 2) + (("alpha", "DELETE", "refused: missing_permission") in seen)
        time.sleep(0.2)
    return Outcome(f"{found} of 3 recorded", found == 3)
