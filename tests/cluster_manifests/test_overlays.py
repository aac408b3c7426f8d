"""Every overlay builds and fits the schemas; names, ports and times agree with each other and configs/."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from serve_app.cli.server_process import read_env
from serve_app.settings import Settings, load
from tests.support.kustomize import (
    CLUSTER,
    OVERLAYS,
    build,
    find,
    needs_kubectl,
    pods,
    selected,
    serve_config,
    service_of_ray,
)
from tests.support.server import ROOT

pytestmark = [needs_kubectl, pytest.mark.integration]

Resources = tuple[dict[str, Any], ...]

KUBERNETES = "1.34"  # of terraform/eks
NODEPOOLS = tuple(yaml.safe_load_all((CLUSTER / "overlays/eks/nodepools.yaml").read_text()))
CRD_FILES = (ROOT / "tests/data/ray.io_rayservices.json",)
# Operators' resource definitions are not in this repository; tests/data/README.md has their addresses.
MORE_CRDS = os.environ.get("TORCHRELAY_CRDS", "")


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Resources:
    return build(f"overlays/{request.param}")


def settings(resources: Resources) -> Settings:
    (application,) = serve_config(resources)["applications"]
    return load(application["args"], "serveConfigV2")


def closed(schema: Any) -> Any:
    """Return a schema of a resource definition that refuses fields that it does not have."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {
        key: {name: closed(each) for name, each in value.items()} if key == "properties" else closed(value)
        for key, value in schema.items()
    }
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def definitions(files: Iterator[Path] | tuple[Path, ...]) -> dict[tuple[str, str], Any]:
    """Return the schemas of custom resources by version and kind."""
    schemas: dict[tuple[str, str], Any] = {}
    for file in files:
        for crd in yaml.load_all(file.read_text(), yaml.CSafeLoader):
            for version in crd["spec"]["versions"]:
                schema = closed(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                key = f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]
                schemas[key] = schema
    return schemas


CUSTOM = definitions(CRD_FILES)


def test_resources_fit_kubernetes_and_kuberays_schemas(overlay: Resources) -> None:
    checked = set()
    for resource in overlay:
        group = resource["apiVersion"].rpartition("/")[0]
        if schema := CUSTOM.get((resource["apiVersion"], resource["kind"])):
            jsonschema.Draft202012Validator(schema).validate(resource)
        elif "." not in group or (group.endswith(".k8s.io") and not group.startswith("gateway.")):
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)
        else:
            continue
        checked.add(resource["kind"])
    core = {"RayService", "ConfigMap", "Service", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget"}
    assert core <= checked


@pytest.mark.parametrize("name", ["eks", "gke"])
def test_an_overlay_takes_the_incremental_upgrade(name: str, tmp_path: Path) -> None:
    folder = CLUSTER / "components/incremental-upgrade"
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    where = {
        "resources": [os.path.relpath(CLUSTER / "overlays" / name, overlay)],
        "components": [os.path.relpath(folder, overlay)],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(where))
    resource = find(build(str(overlay)), "RayService")["torchrelay"]
    jsonschema.Draft202012Validator(CUSTOM["ray.io/v1", "RayService"]).validate(resource)
    spec = resource["spec"]
    options = spec["upgradeStrategy"]["clusterUpgradeOptions"]
    # What KubeRay's validation requires.
    assert spec["rayClusterConfig"]["enableInTreeAutoscaling"]
    assert 0 < options["stepSizePercent"] <= options["maxSurgePercent"] == 100


def test_a_misspelt_field_does_not_fit() -> None:
    broken = json.loads(json.dumps(find(build("overlays/kind"), "RayService")["torchrelay"]))
    broken["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["serviceAccount_Name"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="serviceAccount_Name"):
        jsonschema.Draft202012Validator(CUSTOM["ray.io/v1", "RayService"]).validate(broken)


@pytest.mark.skipif(not MORE_CRDS, reason="needs TORCHRELAY_CRDS, a folder of resource definitions")
def test_custom_resources_fit_their_operators_definitions() -> None:
    schemas = definitions(Path(MORE_CRDS).glob("*.yaml"))
    overlays = [each for name in OVERLAYS for each in build(f"overlays/{name}")]
    resources = [*NODEPOOLS, *build("kserve"), *overlays]
    custom = [each for each in resources if (each["apiVersion"], each["kind"]) in schemas]
    for resource in custom:
        jsonschema.Draft202012Validator(schemas[resource["apiVersion"], resource["kind"]]).validate(resource)
    assert {
        "NodePool",
        "EC2NodeClass",
        "Gateway",
        "HTTPRoute",
        "PodMonitor",
        "Cluster",
        "InferenceService",
    } <= {each["kind"] for each in custom}


def test_resources_are_in_one_namespace_with_an_image_and_a_tag(overlay: Resources) -> None:
    assert {each["metadata"]["namespace"] for each in overlay} == {"torchrelay"}
    for pod in pods(overlay):
        assert re.fullmatch(r"[\w.:/-]+:[\w.-]+", pod.container["image"]), pod.name


def created_secrets() -> dict[str, set[str]]:
    """Return the keys of the secrets that the page's commands create."""
    page = (CLUSTER / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"create secret \S+ ([\w-]+) (.+)", page)
    return {name: set(re.findall(r"--from-literal=(\w+)=", rest)) for name, rest in commands}


def test_every_reference_of_a_pod_resolves(overlay: Resources) -> None:
    secrets = created_secrets()
    for pod in pods(overlay):
        for source in pod.container.get("envFrom", []):
            if "configMapRef" in source:
                assert source["configMapRef"]["name"] in find(overlay, "ConfigMap")
            else:
                assert secrets[source["secretRef"]["name"]]
        for variable in pod.container.get("env", []):
            if "valueFrom" in variable:
                reference = variable["valueFrom"]["secretKeyRef"]
                assert reference["key"] in secrets[reference["name"]]
        if account := pod.spec.get("serviceAccountName"):
            assert account in find(overlay, "ServiceAccount")
        assert pod.spec["automountServiceAccountToken"] is False
        for volume in pod.spec.get("volumes", []):
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in find(overlay, "PersistentVolumeClaim")
    redis = service_of_ray(overlay)["rayClusterConfig"].get("gcsFaultToleranceOptions")
    if redis is not None:
        reference = redis["redisPassword"]["valueFrom"]["secretKeyRef"]
        assert reference["key"] in secrets[reference["name"]]
    for cluster in find(overlay, "Cluster").values():
        secret = cluster["spec"]["bootstrap"]["initdb"]["secret"]["name"]
        assert secrets[secret] == {"username", "password"}


def test_a_pod_mounts_its_volumes(overlay: Resources) -> None:
    sidecar = service_of_ray(overlay)["rayClusterConfig"].get("autoscalerOptions", {}).get("volumeMounts", [])
    claimed = {"torchrelay-redis": {"data"}}
    for pod in pods(overlay):
        mounts = [*pod.container["volumeMounts"], *(sidecar if pod.name == "head" else [])]
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        assert {mount["name"] for mount in mounts} == volumes | claimed.get(pod.name, set())


def test_selectors_match_pods_and_services_have_their_ports(overlay: Resources) -> None:
    for service in find(overlay, "Service").values():
        chosen = selected(overlay, service["spec"]["selector"])
        assert chosen, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert all(pod.ports[port["targetPort"]] for pod in chosen)
    for kind, key in (
        ("NetworkPolicy", "podSelector"),
        ("PodDisruptionBudget", "selector"),
        ("PodMonitor", "selector"),
    ):
        for name, resource in find(overlay, kind).items():
            chosen = selected(overlay, resource["spec"][key]["matchLabels"])
            assert chosen, name
            for endpoint in resource["spec"].get("podMetricsEndpoints", []):
                assert all(endpoint["port"] in pod.ports for pod in chosen)


def test_the_ingress_reaches_the_service_of_the_workers(overlay: Resources) -> None:
    service = service_of_ray(overlay)["serveService"]
    (port,) = service["spec"]["ports"]
    for ingress in find(overlay, "Ingress").values():
        (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
        backend = path["backend"]["service"]
        assert backend == {"name": service["metadata"]["name"], "port": {"name": port["name"]}}
        assert "certificate-arn" in str(ingress["metadata"]["annotations"])
    for route in find(overlay, "HTTPRoute").values():
        assert route["spec"]["rules"][0]["backendRefs"] == [
            {"name": service["metadata"]["name"], "port": port["port"]}
        ]
        (parent,) = route["spec"]["parentRefs"]
        (listener,) = find(overlay, "Gateway")[parent["name"]]["spec"]["listeners"]
        assert (parent["sectionName"], listener["protocol"]) == (listener["name"], "HTTPS")
        for kind in ("HealthCheckPolicy", "GCPBackendPolicy"):
            (policy,) = find(overlay, kind).values()
            assert policy["spec"]["targetRef"]["name"] == service["metadata"]["name"]


def test_ports_and_probes_agree_with_the_settings(overlay: Resources) -> None:
    http, found = serve_config(overlay)["http_options"]["port"], settings(overlay)
    (served,) = service_of_ray(overlay)["serveService"]["spec"]["ports"]
    assert served["port"] == served["targetPort"] == http
    (head,) = selected(overlay, {"ray.io/node-type": "head"})
    assert head.ports["management"] == found.management.port
    assert head.ports["metrics"] == found.management.metrics_port
    assert head.ports["grpc-manage"] == found.grpc.management_port
    assert "grpc" not in head.ports, "no gateway runs there"
    for worker in selected(overlay, {"ray.io/node-type": "worker"}):
        assert (worker.ports["serve"], worker.ports["grpc"]) == (http, found.grpc.port)
        assert worker.container["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "serve"}
    for ingress in find(overlay, "Ingress").values():
        path = ingress["metadata"]["annotations"]["alb.ingress.kubernetes.io/healthcheck-path"]
        assert path == "/-/healthz"
    for policy in find(overlay, "HealthCheckPolicy").values():
        check = policy["spec"]["default"]["config"]["httpHealthCheck"]
        assert check == {"requestPath": "/-/healthz", "port": http}


def test_the_head_serves_no_request(overlay: Resources) -> None:
    spec = service_of_ray(overlay)
    assert spec["excludeHeadPodFromServeSvc"] is True
    parameters = spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]
    assert (parameters["num-cpus"], parameters["memory"]) == ("0", "1"), "every replica claims memory"
    assert settings(overlay).inference.gateway_label_selector == {"ray.io/node-group": "!headgroup"}
    workers = sum(group["minReplicas"] for group in spec["rayClusterConfig"]["workerGroupSpecs"])
    assert settings(overlay).inference.gateways <= workers


def in_bytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) << 30 if quantity.endswith("Gi") else int(quantity[:-2]) << 20


def test_replicas_claim_less_memory_than_a_worker_has(overlay: Resources) -> None:
    cluster, types = service_of_ray(overlay)["rayClusterConfig"], settings(overlay).control.node_types
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert not types or types.keys() == groups.keys(), "kind has no autoscaler"
    for name, group in groups.items():
        (worker,) = [pod for pod in pods(overlay) if pod.name == name]
        limits = worker.container["resources"]["limits"]
        (store,) = [each["emptyDir"]["sizeLimit"] for each in worker.spec["volumes"] if each["name"] == "shm"]
        memory = int(group["rayStartParams"]["memory"])
        assert memory + in_bytes(store) + (1 << 30) <= in_bytes(limits["memory"]), "a GiB is Ray's own"
        if types:
            resources = {"CPU": float(limits["cpu"]), "memory": float(memory)}
            gpus = limits.get("nvidia.com/gpu", 0)
            assert types[name] == resources | ({"GPU": float(gpus)} if gpus else {})


def variable(pod: Any, name: str) -> str:
    (value,) = [each["value"] for each in pod.container["env"] if each["name"] == name]
    return str(value)


def test_a_response_of_the_longest_duration_is_finished(overlay: Resources) -> None:
    longest = int(read_env(ROOT / "configs/serve.env")["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
    assert service_of_ray(overlay)["rayClusterDeletionDelaySeconds"] == longest
    for worker in selected(overlay, {"ray.io/node-type": "worker"}):
        assert float(variable(worker, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")) == longest
        assert worker.spec["terminationGracePeriodSeconds"] > longest
        assert worker.spec["terminationGracePeriodSeconds"] < 3600, "of the NodePools"
    for ingress in find(overlay, "Ingress").values():
        attributes = str(ingress["metadata"]["annotations"])
        assert f"deregistration_delay.timeout_seconds={longest}" in attributes
        idle = re.search(r"idle_timeout\.timeout_seconds=(\d+)", attributes)
        assert idle and int(idle[1]) < serve_config(overlay)["http_options"]["keep_alive_timeout_s"]
    for policy in find(overlay, "GCPBackendPolicy").values():
        assert policy["spec"]["default"]["timeoutSec"] == longest
        assert policy["spec"]["default"]["connectionDraining"]["drainingTimeoutSec"] == longest


def test_autoscalers_and_evictions_leave_workers(overlay: Resources) -> None:
    for pod in selected(overlay, {"app.kubernetes.io/name": "torchrelay"}):
        assert pod.annotations["karpenter.sh/do-not-disrupt"] == "true"
        assert pod.annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    (budget,) = find(overlay, "PodDisruptionBudget").values()
    assert {
        pod.labels["ray.io/node-type"] for pod in selected(overlay, budget["spec"]["selector"]["matchLabels"])
    } == {"worker"}
    # The only form that Kubernetes accepts for pods of a resource without the scale subresource.
    assert type(budget["spec"]["minAvailable"]) is int and "maxUnavailable" not in budget["spec"]
    for worker in selected(overlay, {"ray.io/node-type": "worker"}):
        spread = worker.spec["topologySpreadConstraints"]
        assert [each["topologyKey"] for each in spread] == [
            "topology.kubernetes.io/zone",
            "kubernetes.io/hostname",
        ]
        for each in spread:
            assert worker in selected(overlay, each["labelSelector"]["matchLabels"])


def test_redis_and_postgresql_are_where_the_server_looks_for_them() -> None:
    for name in ("eks", "gke"):
        resources = build(f"overlays/{name}")
        address = service_of_ray(resources)["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
        host, _, port = address.removeprefix("redis://").partition(":")
        assert find(resources, "Service")[host]["spec"]["ports"][0]["port"] == int(port)
        assert settings(resources).control.database_url == "postgresql+psycopg://"
    (cluster,) = find(build("overlays/gke"), "Cluster")
    assert f"--from-literal=PGHOST={cluster}-rw " in (CLUSTER / "README.md").read_text()
    egress = str(find(build("overlays/gke"), "NetworkPolicy")["torchrelay"]["spec"]["egress"])
    assert f"'cnpg.io/cluster': '{cluster}'" in egress


def test_gpu_workers_are_found_by_node_autoscalers() -> None:
    for name in ("eks", "gke"):
        (gpu,) = [pod for pod in pods(build(f"overlays/{name}")) if pod.name == "gpu"]
        assert gpu.container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert [each["key"] for each in gpu.spec["tolerations"]] == ["nvidia.com/gpu"]
        assert len(gpu.spec["nodeSelector"]) == 1


def test_kind_needs_neither_cloud_nor_gpu() -> None:
    resources = build("overlays/kind")
    cluster = service_of_ray(resources)["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 1
    assert "enableInTreeAutoscaling" not in cluster and "gcsFaultToleranceOptions" not in cluster
    assert "nvidia.com/gpu" not in str(cluster)
    (claim,) = find(resources, "PersistentVolumeClaim").values()
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"] and "storageClassName" not in claim["spec"]
    assert settings(resources).control.database_url == ""
    assert service_of_ray(resources)["upgradeStrategy"] == {"type": "None"}, "SQLite has one owner"
    kinds = {each["apiVersion"].partition("/")[0] for each in resources}
    assert kinds <= {"v1", "apps", "networking.k8s.io", "policy", "ray.io"}
    node = yaml.safe_load((CLUSTER / "overlays/kind/cluster.yaml").read_text())["nodes"][0]
    (published,) = node["extraPortMappings"]
    (served,) = service_of_ray(resources)["serveService"]["spec"]["ports"]
    assert (published["containerPort"], published["listenAddress"]) == (served["nodePort"], "127.0.0.1")


def test_kind_runs_the_containers_application() -> None:
    inside = yaml.safe_load((ROOT / "configs/container.yaml").read_text())
    on_kind = serve_config(build("overlays/kind"))
    (ours,), (kinds,) = inside.pop("applications"), on_kind.pop("applications")
    assert inside == on_kind
    args, kind_args = ours.pop("args"), kinds.pop("args")
    assert ours == kinds
    for section, values in args.items():
        assert values == kind_args[section] or values.items() <= kind_args[section].items()
