"""The pods of the overlay kind, started by ``podman kube play`` from what kustomize renders.

podman lacks what belongs to a node or to the operator, so these are replaced here: the command that KubeRay
gives a pod, the secret that the page's command creates, names of services, and published ports. It makes
volumes of the kind emptyDir as directories of root: /dev/shm stays podman's own.
"""

from __future__ import annotations

import base64
import copy
import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.archives import ECHO, make_archive
from tests.support.container_images import Images, execute, missing_tools, run, ulimits
from tests.support.kustomize import build, find, serve_config, service_of_ray

_MISSING = missing_tools() or ("" if shutil.which("kubectl") else "needs kubectl")
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "all are here")]

NETWORK = "torchrelay-kube"
KEYS = {"TORCHRELAY_INFER_KEY": "i" * 32, "TORCHRELAY_MANAGE_KEY": "m" * 32}
HEAD, WORKER, CONSOLE = "torchrelay-head", "torchrelay-worker", "torchrelay-console"
# Pod -> its container's name, with podman's prefix.
CONTAINERS = {HEAD: f"{HEAD}-ray-head", WORKER: f"{WORKER}-ray-worker", CONSOLE: f"{CONSOLE}-console"}


def ray_pod(name: str, group: dict[str, Any], token: str) -> dict[str, Any]:
    """Return the pod of a group of the RayCluster, with the command and the token that KubeRay adds."""
    template = copy.deepcopy(group["template"])
    spec = template["spec"]
    [container] = spec["containers"]
    is_head = name == HEAD
    parameters = {
        "num-cpus": "2",
        **group["rayStartParams"],
        "dashboard-agent-listen-port": "52365",
        "labels": f"ray.io/node-group={'headgroup' if is_head else 'cpu'}",
        **({"dashboard-host": "0.0.0.0", "port": "6379"} if is_head else {"address": f"{HEAD}:6379"}),
    }
    options = " ".join(f"--{key}={value}" for key, value in parameters.items())
    container["command"] = ["/bin/bash", "-c", "--"]
    container["args"] = [f"ray start {'--head ' if is_head else ''}{options} --block"]
    container["env"] += [{"name": "RAY_AUTH_TOKEN", "value": token}]
    container["env"] += [{"name": "RAY_raylet_start_wait_time_s", "value": "150"}]  # of a busy machine
    del container["ports"]  # podman would publish them
    container["volumeMounts"] = [each for each in container["volumeMounts"] if each["name"] != "shm"]
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] != "shm"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **template["metadata"]},
        "spec": spec,
    }


def console_pod(resources: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    template = copy.deepcopy(find(resources, "Deployment")[CONSOLE]["spec"]["template"])
    [container] = template["spec"]["containers"]
    services = {"torchrelay-head-svc:": f"{HEAD}:", "torchrelay:8080": f"{WORKER}:8080"}
    for service, pod in services.items():
        container["args"] = [each.replace(f"//{service}", f"//{pod}") for each in container["args"]]
    del container["ports"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": CONSOLE}, "spec": template["spec"]}


@dataclass
class Pods:
    """The running pods, with their addresses by name."""

    images: Images
    addresses: dict[str, str]

    def wait(self, condition: Callable[[], Any], description: str) -> None:
        deadline = time.monotonic() + 240
        while True:
            try:
                if condition():
                    return
            except httpx.HTTPError:
                pass
            logs = "\n".join(f"{name}: {self.logs(name)}" for name in CONTAINERS)
            assert time.monotonic() < deadline, f"{description}\n{logs}"
            time.sleep(0.5)

    def logs(self, pod: str) -> str:
        done = execute(*self.images.podman, "logs", "--tail", "30", CONTAINERS[pod])
        return (done.stdout + done.stderr).decode(errors="replace")

    def probe(self, pod: str, container: dict[str, Any], name: str) -> bool:
        """Request what a probe of the manifest does."""
        probe = container[name]["httpGet"]
        port = {"serve": 8080, "http": 8088}.get(probe["port"], probe["port"])
        return httpx.get(f"http://{self.addresses[pod]}:{port}{probe['path']}", timeout=5).is_success


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    images, folder, token = Images(), tmp_path_factory.mktemp("pods"), secrets.token_hex(32)
    resources = build("overlays/kind")
    cluster = service_of_ray(resources)["rayClusterConfig"]
    [group] = cluster["workerGroupSpecs"]
    shared = [*find(resources, "ConfigMap").values(), *find(resources, "PersistentVolumeClaim").values()]
    documents = [copy.deepcopy(each) for each in shared]
    for document in documents:
        del document["metadata"]["namespace"]
    documents += [ray_pod(HEAD, cluster["headGroupSpec"], token), ray_pod(WORKER, group, token)]
    documents += [console_pod(resources)]
    names = {pod["spec"]["containers"][0]["image"] for pod in documents if pod["kind"] == "Pod"}
    image = images.build("cpu")
    for name in names:
        run(*images.podman, "tag", image, f"localhost/{name}")
    manifest, secret = folder / "pods.yaml", folder / "secret.json"
    manifest.write_text(yaml.safe_dump_all(documents))
    encoded = {name: base64.b64encode(value.encode()).decode() for name, value in KEYS.items()}
    secret.write_text(json.dumps(encoded))
    configuration = folder / "containers.conf"  # the command has no option for these limits
    configuration.write_text(f"[containers]\ndefault_ulimits = {json.dumps(ulimits())}\n")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("CONTAINERS_CONF", str(configuration))
    run(*images.podman, "network", "create", NETWORK)
    try:
        run(*images.podman, "secret", "create", "torchrelay-keys", secret)
        run(*images.podman, "kube", "play", "--network", NETWORK, manifest)
        addresses = {pod: _address(images, CONTAINERS[pod]) for pod in CONTAINERS}
        started = Pods(images, addresses)
        started.wait(lambda: "Ray runtime started" in started.logs(WORKER), "the worker joins the head")
        httpx.put(
            f"http://{addresses[HEAD]}:8265/api/serve/applications/",
            json=serve_config(resources),
            headers={"Authorization": f"Bearer {token}"},
            timeout=120,
        ).raise_for_status()
        yield started
    finally:
        execute(*images.podman, "pod", "rm", "--all", "--force")
        images.remove_containers()
        execute(*images.podman, "secret", "rm", "torchrelay-keys")
        execute(*images.podman, "network", "rm", "--force", NETWORK)
        monkeypatch.undo()


def _address(images: Images, container: str) -> str:
    infra = images.inspect(container)["HostConfig"]["NetworkMode"].removeprefix("container:")
    return str(images.inspect(infra)["NetworkSettings"]["Networks"][NETWORK]["IPAddress"])


def test_the_probes_of_every_pod_succeed(pods: Pods) -> None:
    resources = build("overlays/kind")
    cluster = service_of_ray(resources)["rayClusterConfig"]
    templates = {
        HEAD: cluster["headGroupSpec"]["template"],
        WORKER: cluster["workerGroupSpecs"][0]["template"],
        CONSOLE: find(resources, "Deployment")[CONSOLE]["spec"]["template"],
    }
    for pod, template in templates.items():
        [container] = template["spec"]["containers"]
        for name in {"livenessProbe", "readinessProbe"} & container.keys():
            pods.wait(partial(pods.probe, pod, container, name), f"the {name} of {pod} succeeds")


def test_a_model_of_the_head_s_volume_is_served_by_the_worker(pods: Pods, tmp_path: Path) -> None:
    archive = make_archive(tmp_path, "echo", ECHO)
    path = f"/srv/torchrelay/model_store/{archive.name}"
    copied = execute(
        *(*pods.images.podman, "exec", "--interactive", CONTAINERS[HEAD], "sh", "-c", f"cat > {path}"),
        stdin=archive.read_bytes(),
    )
    assert copied.returncode == 0, copied.stderr
    inference = f"http://{pods.addresses[WORKER]}:8080"
    management = f"http://{pods.addresses[HEAD]}:8081"
    keys = {name: {"Authorization": f"Bearer {value}"} for name, value in KEYS.items()}
    parameters = {"url": archive.name, "initial_workers": "1", "synchronous": "true"}
    assert httpx.post(f"{management}/models", params=parameters).status_code == 400  # without a key
    registered = httpx.post(
        f"{management}/models", params=parameters, headers=keys["TORCHRELAY_MANAGE_KEY"], timeout=180
    )
    assert registered.status_code == 200, registered.text
    answer = httpx.post(
        f"{inference}/predictions/echo", json={"a": 1}, headers=keys["TORCHRELAY_INFER_KEY"], timeout=60
    )
    assert (answer.status_code, answer.json()) == (200, {"a": 1})


def test_the_pods_have_no_rights(pods: Pods) -> None:
    for container in CONTAINERS.values():
        status = run(*pods.images.podman, "exec", container, "cat", "/proc/self/status")
        assert "Uid:\t1000\t1000\t1000\t1000" in status
        assert "CapEff:\t0000000000000000" in status
        done = execute(*pods.images.podman, "exec", container, "touch", "/opt/new")
        assert b"Read-only file system" in done.stderr
