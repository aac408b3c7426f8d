"""Ray clusters of containers, as KubeRay starts its pods: a head without models, and workers.

Each container has the network namespace of a host, and the parameters of ``cluster/base``; the server has
its ``serveConfigV2``. PostgreSQL and Redis run beside them. HAProxy is the service: it balances connections
over the workers that are ready, as kube-proxy does, and repeats nothing.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray.serve._private.haproxy import get_haproxy_binary

from tests.hosts.databases import REDIS_ADDRESS, running_postgres, running_redis
from tests.hosts.host_cluster import GATEWAY, Host, network, unavailable
from tests.hosts.host_load import HANDLERS
from tests.hosts.records import HostLoad, describe
from tests.support.archives import make_archive
from tests.support.container_images import ROOT, Container, Images, missing_tools, run
from tests.support.postgres_server import find_postgres

_MISSING = (
    unavailable()
    or missing_tools()
    or ("" if find_postgres() and shutil.which("redis-server") else "needs PostgreSQL and Redis")
)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "all tools are here"),
]

RAYSERVICE: dict[str, Any] = yaml.safe_load((ROOT / "cluster/base/rayservice.yaml").read_text())["spec"]
HEAD = 1  # the number of its host
# Seconds until no connection is sent to a killed worker: the readiness probe of the manifest and its timeout.
NOT_READY_S = 7.0
DRAINED_S = 400  # in which a worker without long responses ends on a busy machine
RIGHTS = (
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--shm-size", "1g"),
    *("--tmpfs", "/tmp:exec", "--volume", "/home/torchrelay", "--stop-signal", "SIGTERM"),
)


class Service:
    """A balancer of the inference and gRPC ports over ready workers."""

    def __init__(self, folder: Path, workers: range) -> None:
        self._socket = folder / "service.sock"
        servers = "\n".join(f" server w{n} 10.231.7.{n}:{{port}} check port 8080" for n in workers)
        backends = "\n".join(
            f"listen {name}\n bind {GATEWAY}:{port}\n option httpchk GET /-/healthz\n"
            f"{servers.format(port=port)}"
            for name, port in (("http", 8080), ("grpc", 7070))
        )
        (folder / "service.cfg").write_text(f"""global
 stats socket {self._socket} level admin
defaults
 mode tcp
 timeout connect 2s
 timeout client 60s
 timeout server 60s
 timeout check 2s
 retries 0
 default-server inter 5s fastinter 5s downinter 1s fall 1 rise 1
{backends}
""")
        self._process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", folder / "service.cfg"])

    def remove(self, number: int) -> None:
        """Send a worker no further connections, as for a pod that is going to end."""
        for backend in ("http", "grpc"):
            with socket.socket(socket.AF_UNIX) as control:
                control.connect(str(self._socket))
                control.sendall(f"set server {backend}/w{number} state drain\n".encode())
                assert control.recv(100).strip() == b""

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class Cluster:
    """A head and workers, each in a container of an image."""

    def __init__(self, images: Images, folder: Path, database: str) -> None:
        self._images = images
        self._folder = folder
        self._token = secrets.token_hex(32)
        self._hosts: dict[int, Host] = {}
        self.containers: dict[int, Container] = {}
        self.management = httpx.Client(base_url=f"http://10.231.7.{HEAD}:8081", timeout=180)
        config = yaml.safe_load(RAYSERVICE["serveConfigV2"])
        settings = config["applications"][0]["args"]
        settings["control"] |= {"database_url": database}
        settings["control"].pop("node_types")  # of the autoscaler, which needs Kubernetes
        settings["auth"] = {"mode": "off"}  # the load has no keys
        settings["inference"]["gateway_label_selector"] = {"ray.io/node-group": "cpu"}
        self._config = config

    def start(self, number: int, image: str, *options: str) -> Container:
        """Start the head or a worker on a host, by the parameters of the manifest."""
        group = RAYSERVICE["rayClusterConfig"]
        group = group["headGroupSpec"] if number == HEAD else group["workerGroupSpecs"][0]
        if number not in self._hosts:
            self._hosts[number] = Host(number, self._folder, {})
            self._hosts[number].connect()
        address = f"10.231.7.{number}"
        parameters = {
            **group["rayStartParams"],
            "node-ip-address": address,
            "dashboard-agent-listen-port": "52365",
            **({"dashboard-host": "0.0.0.0"} if number == HEAD else {"address": f"10.231.7.{HEAD}:6379"}),
            **({} if number == HEAD else {"num-cpus": "4", "memory": str(4 << 30)}),
            "labels": f"ray.io/node-group={'headgroup' if number == HEAD else 'cpu'}",
        }
        words = ["ray", "start", *(["--head"] if number == HEAD else []), "--block"]
        words += [f"--{name}={value}" for name, value in parameters.items()]
        env = {
            "RAY_AUTH_TOKEN": self._token,
            "RAY_external_storage_namespace": "torchrelay",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0" if number == HEAD else "1800",
            "RAY_raylet_start_wait_time_s": "150",
            "RAY_agent_register_timeout_ms": "120000",
        }
        if number == HEAD:
            env["RAY_REDIS_ADDRESS"] = REDIS_ADDRESS
            options += ("--volume", "home:/srv/torchrelay")
        variables = [f"--env={name}={value}" for name, value in env.items()]
        network = f"ns:/run/netns/{self._hosts[number].name}"
        container = Container(
            self._images, image, *RIGHTS, *variables, *options, command=words, network=network
        )
        self.containers[number] = container
        return container

    def deploy(self) -> None:
        """Send the configuration to the dashboard, as KubeRay does, and wait for Management."""

        def deployed() -> bool:
            response = httpx.put(
                f"http://10.231.7.{HEAD}:8265/api/serve/applications/",
                json=self._config,
                headers={"Authorization": f"Bearer {self._token}"},
                timeout=60,
            )
            return response.is_success

        self.wait(deployed, "the dashboard takes the configuration")
        self.wait(lambda: self.management.get("/models").is_success, "Management")

    def register(self, archive: Path, **parameters: Any) -> None:
        data = archive.read_bytes()
        path = f"/srv/torchrelay/model_store/{archive.name}"
        copied = self.containers[HEAD].exec("sh", "-c", f"cat > {path}", stdin=data)
        assert copied.returncode == 0, copied.stderr
        response = self.management.post(
            "/models", params={"url": archive.name, "synchronous": "true", **parameters}
        )
        assert response.status_code == 200, response.text

    def is_ready(self, number: int) -> bool:
        """Return what the readiness probe of a worker does."""
        return httpx.get(f"http://10.231.7.{number}:8080/-/healthz", timeout=2).is_success

    def remove(self, number: int) -> None:
        self.containers.pop(number).remove()

    def wait(self, condition: Any, description: str, timeout: float = 240.0) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                if condition():
                    return
            except (httpx.HTTPError, ValueError, LookupError):
                pass
            logs = "\n".join(f"{n}: {c.logs()[-3000:]}" for n, c in self.containers.items())
            assert time.monotonic() < deadline, f"not within {timeout:g} s: {description}\n{logs}"
            assert all(c.state["Running"] for c in self.containers.values()), logs
            time.sleep(0.5)

    def close(self) -> None:
        self.management.close()
        for container in self.containers.values():
            container.remove()


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    found = Images()
    yield found
    found.remove_containers()


@pytest.fixture(scope="module")
def image(images: Images) -> str:
    return images.build("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with network():
        service = Service(folder, range(2, 6))
        yield service
        service.close()


@pytest.fixture(scope="module")
def cluster(images: Images, image: str, folder: Path, service: Service) -> Iterator[Cluster]:
    with ExitStack() as stack:
        stack.enter_context(running_redis(folder))
        database = stack.enter_context(running_postgres())
        cluster = Cluster(images, folder, database)
        stack.callback(cluster.close)
        for number in (HEAD, 2, 3):
            cluster.start(number, image)
        cluster.deploy()
        for name, handler in HANDLERS.items():
            archive = make_archive(folder, name, handler, config={"batchSize": 8})
            cluster.register(archive, initial_workers=4)
        for number in (2, 3):
            cluster.wait(lambda n=number: cluster.is_ready(n), f"worker {number} is ready")
        yield cluster


@pytest.fixture
def load(cluster: Cluster, folder: Path) -> Iterator[HostLoad]:
    with HostLoad(folder, [GATEWAY]) as load:
        yield load


def add_worker(cluster: Cluster, number: int, image: str) -> None:
    """Start a worker, and wait until it is a node of the cluster."""
    worker = cluster.start(number, image)
    cluster.wait(lambda: "Ray runtime started" in worker.logs(), f"worker {number} has joined")


def test_models_are_placed_on_all_workers(load: HostLoad) -> None:
    began = time.monotonic()
    load.wait(lambda: all(load.used(f"10.231.7.{n}", began) for n in (2, 3)), "replicas on both workers")
    assert not [record for record in load.records() if record.error]


def test_requests_fail_for_seconds_only_where_a_worker_is_killed(
    cluster: Cluster, load: HostLoad, image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = time.monotonic()
    cluster.containers[3].kill()
    cluster.remove(3)
    add_worker(cluster, 4, image)
    load.wait(lambda: load.used("10.231.7.4", killed), "replicas on the new worker", 240)
    records = load.records(killed)
    with capsys.disabled():
        print(f"\na worker killed: {describe(records, killed)}")
    assert not [record for record in records if record.error and record.start > killed + NOT_READY_S]


def test_a_rolling_upgrade_to_another_image_fails_no_request(
    cluster: Cluster,
    load: HostLoad,
    service: Service,
    images: Images,
    image: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each worker is replaced by one of the new image, then the head; workers outlive their head.

    A worker that gets SIGTERM ends when its replicas run elsewhere.
    """
    new = "localhost/torchrelay:next"
    run(*images.podman, "tag", image, new)
    began = time.monotonic()
    for old, number in ((2, 3), (4, 5)):
        add_worker(cluster, number, new)
        since = time.monotonic()
        service.remove(old)
        code = cluster.containers[old].stop(timeout=DRAINED_S)
        with capsys.disabled():
            print(f"\nworker {old} was drained in {time.monotonic() - since:.0f} s")
        assert code == 1, cluster.containers[old].logs()  # of `ray start` after SIGTERM; 137: it was killed
        cluster.remove(old)
        load.wait(lambda host=f"10.231.7.{number}", at=since: load.used(host, at), "replicas on the new one")
    cluster.containers[HEAD].stop(timeout=60)
    cluster.remove(HEAD)
    cluster.start(HEAD, new)
    cluster.wait(lambda: len(cluster.management.get("/models").json()["models"]) == 2, "the registry")
    since = time.monotonic()
    load.wait(lambda: load.served(GATEWAY, since, 20), "requests after the head's return")
    with capsys.disabled():
        print(f"\nall replaced: {describe(load.records(began), began)}")
    assert not [record for record in load.records(began) if record.error]
    assert {c.image for c in cluster.containers.values()} == {new}
