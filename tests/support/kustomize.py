"""The manifests of cluster/, as kubectl builds them, and what their pods, services and names are."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from tests.support.requirements import needs_program
from tests.support.server import ROOT

CLUSTER = ROOT / "cluster"
OVERLAYS = ("kind", "eks", "gke")

needs_kubectl = needs_program("kubectl")


@cache
def build(folder: str) -> tuple[dict[str, Any], ...]:
    """Return the resources of a folder of cluster/, as `kubectl kustomize` writes them."""
    command = ["kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", str(CLUSTER / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.load_all(done.stdout, yaml.CSafeLoader))


def find(resources: tuple[dict[str, Any], ...], kind: str) -> dict[str, dict[str, Any]]:
    """Return the resources of a kind by name."""
    return {each["metadata"]["name"]: each for each in resources if each["kind"] == kind}


def service_of_ray(resources: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Return the specification of the one RayService."""
    (service,) = find(resources, "RayService").values()
    spec: dict[str, Any] = service["spec"]
    return spec


def serve_config(resources: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Return the parsed `serveConfigV2`."""
    document: dict[str, Any] = yaml.safe_load(service_of_ray(resources)["serveConfigV2"])
    return document


@dataclass(frozen=True)
class Pod:
    """A pod that the resources start: its labels, with those that KubeRay adds, and its specification."""

    name: str
    labels: dict[str, str]
    spec: dict[str, Any]
    annotations: dict[str, str]

    @property
    def container(self) -> dict[str, Any]:
        (only,) = self.spec["containers"]
        found: dict[str, Any] = only
        return found

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


def pods(resources: tuple[dict[str, Any], ...]) -> Iterator[Pod]:
    """Yield the pods of deployments and stateful sets, and those of the RayService."""
    for kind in ("Deployment", "StatefulSet"):
        for name, resource in find(resources, kind).items():
            yield _pod(name, resource["spec"]["template"], {})
    cluster = service_of_ray(resources)["rayClusterConfig"]
    yield _pod("head", cluster["headGroupSpec"]["template"], {"ray.io/node-type": "head"})
    for group in cluster["workerGroupSpecs"]:
        labels = {"ray.io/node-type": "worker", "ray.io/serve": "true"}
        yield _pod(group["groupName"], group["template"], labels)


def _pod(name: str, template: dict[str, Any], added: dict[str, str]) -> Pod:
    metadata = template["metadata"]
    return Pod(name, metadata["labels"] | added, template["spec"], metadata.get("annotations", {}))


def selected(resources: tuple[dict[str, Any], ...], labels: dict[str, str]) -> list[Pod]:
    """Return the pods that a selector matches."""
    return [pod for pod in pods(resources) if labels.items() <= pod.labels.items()]
