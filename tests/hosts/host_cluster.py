"""A cluster of several hosts on this machine: one network namespace, raylet and HAProxy per host.

The bridge, the clients and the databases are in a namespace of their own, so no packet leaves these
namespaces. `ip netns exec` gives every host its own mounts: /tmp is its disk, and /tmp/home/model_store a
folder that all hosts share. The namespaces are all that exists outside of the test's folder; ``remove_hosts``
deletes them with their processes, also those of an aborted run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from serve_app.cli.server_process import read_env
from tests.support.server import ROOT

NETWORK = "torchrelay-net"
GATEWAY = "10.231.7.254"  # the bridge's address, where the clients and the databases are
_PREFIX = "torchrelay-host"
_RELAY = f"{_PREFIX}-relay"
_LOCK = "/tmp/torchrelay-hosts.lock"
_NEWNET = 0x40000000  # CLONE_NEWNET


def unavailable() -> str:
    """Return why several hosts cannot run here, or an empty string."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if Path(sys.executable).is_relative_to("/tmp"):
        return "needs a Python outside /tmp, in whose place each host has its disk"
    missing = [tool for tool in ("ip", "nft", "tc") if not shutil.which(tool)]
    return f"needs {', '.join(missing)}" if missing else ""


class Host:
    """A host: a namespace with the address 10.231.7.N, and a folder as its disk."""

    def __init__(self, number: int, folder: Path, env: dict[str, str]) -> None:
        self.name = f"{_PREFIX}{number}"
        self.address = f"10.231.7.{number}"
        self.url = f"http://{self.address}:8080"
        self.disk = folder / self.name
        self._link = f"host{number}"  # its end of the cable, at the bridge
        self._store = folder / "model_store"
        self.env = dict(env)
        self._children: list[subprocess.Popen[bytes]] = []

    def connect(self) -> None:
        """Create the namespace, and its cable to the bridge."""
        peer = ("type", "veth", "peer", "eth0", "netns", self.name)
        run("ip", "netns", "add", self.name)
        run("ip", "-n", NETWORK, "link", "add", self._link, *peer)
        run("ip", "-n", NETWORK, "link", "set", self._link, "master", "bridge", "up")
        run("ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run("ip", "-n", self.name, "link", "set", device, "up")

    def start(self, *command: str | Path) -> subprocess.Popen[bytes]:
        """Start a command on this host."""
        for folder in ("checkout", "home/model_store"):
            (self.disk / folder).mkdir(parents=True, exist_ok=True)
        script = f"""set -e
            mount --bind {ROOT} {self.disk}/checkout
            mount --bind {self._store} {self.disk}/home/model_store
            mount --rbind {self.disk} /tmp
            cd /tmp/checkout
            exec {shlex.join(map(str, command))}"""
        with (self.disk / "output.log").open("ab") as log:
            child = subprocess.Popen(
                ["ip", "netns", "exec", self.name, "sh", "-c", script],
                env=os.environ | self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def start_ray(self, head: Host) -> subprocess.Popen[bytes]:
        """Start Ray's processes of this host; they join the head's cluster."""
        joined = [] if head is self else [head.address]
        (self.disk / "output.log").unlink(missing_ok=True)
        shutil.rmtree(self.disk / "ray", ignore_errors=True)  # as after a boot of the host
        return self.start(sys.executable, "-m", "tests.hosts.start_ray", self.address, *joined)

    def wait_for_ray(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 150
        while "started\n" not in self.log():
            assert process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def disconnect(self) -> None:
        """Pull the cable."""
        run("ip", "-n", NETWORK, "link", "set", self._link, "down")

    def reconnect(self) -> None:
        run("ip", "-n", NETWORK, "link", "set", self._link, "up")

    def kill(self) -> None:
        """Kill all processes of this host at once."""
        kill_processes(self.name)
        for child in self._children:
            child.wait()
        self._children.clear()

    def processes(self, title: str) -> list[psutil.Process]:
        """Return the processes of this host whose command line begins with ``title``."""
        found = []
        for pid in _pids(self.name):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if " ".join(process.cmdline()).startswith(title):
                    found.append(process)
        return found

    @contextlib.contextmanager
    def packet_loss(self, percent: int) -> Iterator[Callable[[], int]]:
        """Drop a share of the packets that reach this host; yield a function that counts them."""
        nft = ("ip", "netns", "exec", self.name, "nft")
        rules = f"""table inet loss {{
            counter dropped {{ }}
            chain input {{
                type filter hook input priority 0;
                iif "eth0" numgen random mod 100 < {percent} counter name dropped drop;
            }}
        }}"""
        subprocess.run([*nft, "-f", "-"], input=rules, text=True, check=True)
        try:
            yield lambda: int(
                run(*nft, "list", "counter", "inet", "loss", "dropped").split("packets ")[1].split()[0]
            )
        finally:
            run(*nft, "delete", "table", "inet", "loss")

    @contextlib.contextmanager
    def bandwidth(self, rate: str) -> Iterator[Callable[[], int]]:
        """Limit what this host sends; yield a function that counts the packets that had to wait."""
        tc = ("ip", "netns", "exec", self.name, "tc")
        run(*tc, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "3kb", "latency", "1s")
        try:
            yield lambda: int(
                run(*tc, "-s", "qdisc", "show", "dev", "eth0").split("overlimits ")[1].split()[0]
            )
        finally:
            run(*tc, "qdisc", "delete", "dev", "eth0", "root")

    @contextlib.contextmanager
    def delay(self, seconds: float) -> Iterator[Callable[[], int]]:
        """Delay what this host sends and receives; yield a function that counts the packets that it sent.

        A relay between its cable and the bridge does it, in a namespace of its own without addresses.
        """
        run("ip", "netns", "add", _RELAY)
        run("ip", "-n", NETWORK, "link", "set", self._link, "netns", _RELAY)
        run("ip", "-n", NETWORK, "link", "add", "delayed", "type", "veth", "peer", "uplink", "netns", _RELAY)
        run("ip", "-n", NETWORK, "link", "set", "delayed", "master", "bridge", "up")
        for device in (self._link, "uplink"):
            run("ip", "-n", _RELAY, "link", "set", device, "up")
        command = [sys.executable, "-m", "tests.hosts.delay_relay", self._link, "uplink", str(seconds)]
        relay = subprocess.Popen(
            ["ip", "netns", "exec", _RELAY, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        try:
            assert relay.stdout is not None
            with relay.stdout:
                assert relay.stdout.readline() == "started\n"
            shown = ("ip", "-n", _RELAY, "-j", "-s", "link", "show", self._link)
            yield lambda: int(json.loads(run(*shown))[0]["stats64"]["rx"]["packets"])
            assert relay.poll() is None
        finally:
            relay.kill()
            relay.wait()
            run("ip", "-n", _RELAY, "link", "set", self._link, "netns", NETWORK)
            run("ip", "netns", "delete", _RELAY)  # with its devices
            run("ip", "-n", NETWORK, "link", "set", self._link, "master", "bridge", "up")

    def log(self) -> str:
        return (self.disk / "output.log").read_text(errors="replace")[-4000:]

    def server_log(self) -> str:
        """Return the messages of the server on this host; the file is created with the first one."""
        return "".join(file.read_text() for file in self.disk.glob("home/logs/ts_log.log"))


class Hosts:
    """``count`` hosts and the server on them; the first one is the head, which runs Management."""

    def __init__(self, folder: Path, count: int, redis_address: str = "", **env: str) -> None:
        variables = {
            **read_env(ROOT / "configs/serve.env"),
            "PYTHONPATH": "/tmp/checkout",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_raylet_start_wait_time_s": "150",
            "RAY_agent_register_timeout_ms": "120000",
            # As KubeRay sets them: the workers outlive the head.
            "RAY_external_storage_namespace": "torchrelay",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
            **env,
        }
        self.store = folder / "model_store"
        self.store.mkdir()
        self._hosts = [Host(number, folder, variables) for number in range(1, count + 1)]
        if redis_address:  # the head's only
            self[0].env["RAY_REDIS_ADDRESS"] = redis_address
        self.bucket: Any = None  # a client of S3
        self.management = httpx.Client(base_url="http://10.231.7.1:8081", timeout=120)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def start(self, **settings: Any) -> None:
        """Start Ray on every host and the application on the head."""
        for host in self:
            host.connect()
        self.start_ray(self[0])
        self.start_ray(*self[1:])
        document = yaml.safe_load((ROOT / "configs/container.yaml").read_text())
        document["applications"][0]["args"] |= {
            "home": "/tmp/home",
            "auth": {"mode": "off"},
            "inference": {"gateways": len(self._hosts)},
            **settings,
        }
        (self[0].disk / "app.yaml").write_text(yaml.safe_dump(document))
        self.deploy()

    def start_ray(self, *hosts: Host) -> None:
        started = [(host, host.start_ray(self[0])) for host in hosts]
        for host, process in started:
            host.wait_for_ray(process)

    def deploy(self) -> None:
        """Deploy the application, and wait until every host's ports answer."""
        address = f"{self[0].address}:6379"
        deployed = self[0].start(
            sys.executable, "-m", "serve_app.deployments.ray_internals.deploy", address, "/tmp/app.yaml"
        )
        assert deployed.wait(120) == 0, self[0].log()
        self.wait(lambda: self.management.get("/models").is_success, "Management")
        for host in self:
            self.wait(
                lambda url=host.url: httpx.get(f"{url}/ping", timeout=5).is_success,
                f"the port of {host.name}",
            )

    def register(self, archive: Path, **parameters: Any) -> httpx.Response:
        """Copy an archive into the shared model store and register it."""
        shutil.copy(archive, self.store)
        return self.management.post(
            "/models", params={"url": archive.name, "synchronous": "true", **parameters}
        )

    def wait(self, condition: Callable[[], Any], description: str, timeout: float = 150.0) -> Any:
        """Wait until ``condition()`` is true, and return its result."""
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(httpx.HTTPError, ValueError, LookupError):
                if result := condition():
                    return result
            assert time.monotonic() < deadline, f"not within {timeout:g} s: {description}\n{self[0].log()}"
            time.sleep(0.1)

    def close(self) -> None:
        self.management.close()
        for host in self:
            host.kill()


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Move this thread, and what it starts, into a namespace with the bridge; remove all namespaces then.

    Another run on this machine waits meanwhile.
    """
    with open(_LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_hosts()
        with _entered_network():
            yield


@contextlib.contextmanager
def _entered_network() -> Iterator[None]:
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        run("ip", "netns", "add", NETWORK)
        run("ip", "-n", NETWORK, "link", "add", "bridge", "type", "bridge")
        # Else the bridge takes a device's address, and changes it when that device is removed.
        run("ip", "-n", NETWORK, "link", "set", "bridge", "address", "02:00:0a:e7:07:fe")
        run("ip", "-n", NETWORK, "address", "add", f"{GATEWAY}/24", "dev", "bridge")
        for device in ("lo", "bridge"):
            run("ip", "-n", NETWORK, "link", "set", device, "up")
        entered = os.open(f"/run/netns/{NETWORK}", os.O_RDONLY)
        _enter(entered)
        os.close(entered)
        yield
    finally:
        _enter(own)
        os.close(own)
        remove_hosts()


def remove_hosts() -> None:
    """Delete the hosts' processes and namespaces, with their devices and rules."""
    for name in namespaces():
        kill_processes(name)
        run("ip", "netns", "delete", name)


def namespaces() -> list[str]:
    """Return the names of the existing namespaces of hosts, and of their network."""
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]
    return [name for name in names if name.startswith(_PREFIX) or name == NETWORK]


def kill_processes(name: str) -> None:
    """Kill the processes of a namespace until there are none: some start others meanwhile."""
    deadline = time.monotonic() + 30
    while pids := [pid for pid in _pids(name) if pid != os.getpid()]:
        assert time.monotonic() < deadline, f"processes of {name} do not end: {pids}"
        processes = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                processes.append(psutil.Process(pid))
                os.kill(pid, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=1)


def _pids(name: str) -> list[int]:
    return [int(pid) for pid in run("ip", "netns", "pids", name).split()]


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
