"""The base of the manifests agrees with the server and with configs/. The overlays have their own file."""

from __future__ import annotations

import json
import re
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from typer.main import get_command

from serve_app.cli.app import app
from serve_app.cli.server_process import read_env
from serve_app.settings import load

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
BASE = CLUSTER / "base"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


KUSTOMIZATION = read(BASE / "kustomization.yaml")
CONSOLE = {document["kind"]: document for document in yaml.safe_load_all((BASE / "console.yaml").read_text())}
MANIFESTS = {name: read(BASE / name) for name in ("rayservice.yaml", "network.yaml", "grpc.yaml")}
SERVICE = MANIFESTS["rayservice.yaml"]
CLUSTER_SPEC = SERVICE["spec"]["rayClusterConfig"]
SERVE = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
HEAD = CLUSTER_SPEC["headGroupSpec"]
GROUPS = [HEAD, *CLUSTER_SPEC["workerGroupSpecs"]]


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    return only


def port(group: dict[str, Any], name: str) -> int:
    return {p["name"]: p["containerPort"] for p in container(group)["ports"]}[name]


def application(document: dict[str, Any]) -> dict[str, Any]:
    (only,) = document["applications"]
    return only


@pytest.mark.parametrize("name", ["app.yaml", "container.yaml", "rayservice.yaml"])
def test_an_application_is_what_serve_and_the_server_accept(name: str) -> None:
    document = SERVE if name == "rayservice.yaml" else read(ROOT / "configs" / name)
    assert set(document) <= set(ServeDeploySchema.model_fields)
    ServeDeploySchema.model_validate(document)
    load(application(document)["args"], name)


def test_in_a_container_only_addresses_and_paths_differ() -> None:
    ours, inside = read(ROOT / "configs/app.yaml"), read(ROOT / "configs/container.yaml")
    assert inside["http_options"].pop("host") == "0.0.0.0" and ours["http_options"].pop("host") == "127.0.0.1"
    inside_args = application(inside)["args"]
    assert inside_args.pop("home") == "/srv/torchrelay"
    assert inside_args["management"].pop("host") == inside_args["management"].pop("metrics_host") == "0.0.0.0"
    assert inside_args["grpc"].pop("host") == inside_args["grpc"].pop("management_host") == "0.0.0.0"
    assert inside == ours


def test_the_cluster_runs_the_container_s_application() -> None:
    inside, on_cluster = read(ROOT / "configs/container.yaml"), json.loads(json.dumps(SERVE))
    args, cluster_args = application(inside).pop("args"), application(on_cluster).pop("args")
    assert on_cluster == inside
    for room, values in args.items():
        assert cluster_args[room] == (values if room == "home" else {**cluster_args[room], **values})


def test_the_registry_s_password_is_in_no_manifest() -> None:
    """Check that libpq takes host, user and password from a Secret through the environment."""
    assert application(SERVE)["args"]["control"]["database_url"] == "postgresql+psycopg://"
    secrets = [source["secretRef"]["name"] for source in container(HEAD)["envFrom"] if "secretRef" in source]
    assert "torchrelay-database" in secrets
    assert all(value not in read_env(ROOT / "configs/serve.env") for value in ("PGHOST", "PGPASSWORD"))


def test_every_request_shows_a_key_that_is_in_no_manifest() -> None:
    args = application(SERVE)["args"]
    keys = load(args).auth.keys
    assert load(args).requires_keys(SERVE["http_options"]["host"])
    assert {key.role for key in keys} == {"infer", "manage"}
    assert all(key.key.startswith("env:") for key in keys)
    secrets = [source["secretRef"]["name"] for source in container(HEAD)["envFrom"] if "secretRef" in source]
    assert "torchrelay-keys" in secrets
    page = (CLUSTER / "README.md").read_text()
    assert all(f"--from-literal={key.key.removeprefix('env:')}=" in page for key in keys)


def env_file() -> dict[str, str]:
    return read_env(ROOT / "configs/serve.env")


def test_every_node_has_the_one_environment() -> None:
    (generator,) = KUSTOMIZATION["configMapGenerator"]
    (env,) = generator["envs"]
    assert (BASE / env).resolve() == ROOT / "configs/serve.env"
    for group in GROUPS:
        names = [
            source["configMapRef"]["name"]
            for source in container(group)["envFrom"]
            if "configMapRef" in source
        ]
        assert names == [generator["name"]]
        # `env` has precedence over the file.
        own = {variable["name"] for variable in container(group)["env"]}
        assert own == {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"} and not own & set(env_file())


def test_kustomize_finds_every_place_of_the_generated_name() -> None:
    (names,) = read(BASE / KUSTOMIZATION["configurations"][0])["nameReference"]
    assert names["kind"] == "ConfigMap"
    for spec in names["fieldSpecs"]:
        here: list[Any] = [SERVICE] if spec["kind"] == SERVICE["kind"] else []
        for part in spec["path"].split("/"):
            here = [step[part] for step in here if part in step]
            here = [item for step in here for item in (step if isinstance(step, list) else [step])]
        assert set(here) == {"torchrelay-serve-env"}, spec["path"]


def test_ports_agree() -> None:
    args = application(SERVE)["args"]
    http = SERVE["http_options"]["port"]
    (served,) = SERVICE["spec"]["serveService"]["spec"]["ports"]
    assert served["port"] == served["targetPort"] == http
    assert port(HEAD, "management") == args["management"]["port"]
    assert port(HEAD, "metrics") == args["management"]["metrics_port"]
    taken = {http, args["management"]["port"], args["management"]["metrics_port"]}
    for group in GROUPS:
        assert port(group, "serve") == http
        # KubeRay would take 8080 for it, which is ours.
        own = int(group["rayStartParams"]["metrics-export-port"])
        assert own == port(group, "ray-metrics") and own not in taken
    expose = next(
        line for line in (CLUSTER / "Dockerfile").read_text().splitlines() if line.startswith("EXPOSE ")
    )
    assert taken < {int(number) for number in expose.split()[1:]}


def test_grpc_s_name_gives_the_pods_that_have_its_port() -> None:
    service = MANIFESTS["grpc.yaml"]
    args = application(SERVE)["args"]
    (served,) = service["spec"]["ports"]
    assert service["spec"]["clusterIP"] == "None"  # calls are balanced by clients, connections by nobody
    assert served["port"] == args["grpc"]["port"]
    selector = dict(service["spec"]["selector"])
    assert selector.pop("ray.io/serve") == "true"
    for group in GROUPS[1:]:  # the head never has that label
        assert selector.items() <= group["template"]["metadata"]["labels"].items()
        assert port(group, served["targetPort"]) == served["port"]
    assert args["grpc"]["max_connection_age"] > 0  # else who is connected never hears of another pod
    page = (CLUSTER / "README.md").read_text()
    assert f"dns:///{service['metadata']['name']}.{KUSTOMIZATION['namespace']}:{served['port']}" in page


def test_management_by_grpc_is_open_to_whom_management_is() -> None:
    """KubeRay's service of the head has every port of its container."""
    args = application(SERVE)["args"]
    assert port(HEAD, "grpc-manage") == args["grpc"]["management_port"]
    rules = [
        {p["port"] for p in rule["ports"]}
        for rule in MANIFESTS["network.yaml"]["spec"]["ingress"]
        if "ports" in rule
    ]
    ports = {args["management"]["port"], args["grpc"]["management_port"]}
    assert [ports <= rule for rule in rules if ports & rule] == [True]


def test_strangers_reach_the_inference_port_alone() -> None:
    policy = MANIFESTS["network.yaml"]["spec"]
    label = policy["podSelector"]["matchLabels"]
    for group in GROUPS:
        assert label.items() <= group["template"]["metadata"]["labels"].items()
    open_to_all = [rule for rule in policy["ingress"] if not rule.get("from")]
    inference = [SERVE["http_options"]["port"], application(SERVE)["args"]["grpc"]["port"]]
    assert [[p["port"] for p in rule["ports"]] for rule in open_to_all] == [inference]
    assert CLUSTER_SPEC["authOptions"] == {"mode": "token"}


RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@pytest.mark.parametrize("group", GROUPS, ids=["head", "cpu"])
def test_pods_have_no_rights_and_a_read_only_root(group: dict[str, Any]) -> None:
    spec, only = group["template"]["spec"], container(group)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == RESTRICTED
    # Ray, HAProxy and the server write there; the user's home has caches.
    mounts = {mount["mountPath"]: mount["name"] for mount in only["volumeMounts"]}
    home = application(SERVE)["args"]["home"]
    assert {"/tmp", "/dev/shm", "/home/torchrelay", home} == set(mounts)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for name in mounts.values():
        assert "persistentVolumeClaim" in volumes[name] or "sizeLimit" in volumes[name]["emptyDir"]
    for kind in ("cpu", "memory", "ephemeral-storage"):
        assert only["resources"]["limits"][kind]


def test_only_the_autoscaler_has_a_token_of_kubernetes() -> None:
    options = CLUSTER_SPEC["autoscalerOptions"]
    assert options["securityContext"] == RESTRICTED
    [token] = [v for v in HEAD["template"]["spec"]["volumes"] if "projected" in v]
    mounts = {mount["name"]: mount["mountPath"] for mount in options["volumeMounts"]}
    assert mounts[token["name"]] == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert token["name"] not in {mount["name"] for mount in container(HEAD)["volumeMounts"]}
    kinds = [next(iter(source)) for source in token["projected"]["sources"]]
    assert kinds == ["serviceAccountToken", "configMap", "downwardAPI"]


def test_pods_reach_names_databases_and_https_only() -> None:
    policy = MANIFESTS["network.yaml"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    by_port = {port["port"]: rule["to"] for rule in policy["egress"] for port in rule.get("ports", [])}
    assert set(by_port) == {53, 443, 5432, 6379}
    [anywhere] = by_port[443]
    assert anywhere["ipBlock"] == {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}
    blocks = [to["ipBlock"]["cidr"] for to in by_port[5432] if "ipBlock" in to]
    assert blocks and all(ip_network(block).is_private for block in blocks)
    assert by_port[6379] == by_port[5432]
    own = [rule for rule in policy["egress"] if "ports" not in rule]
    assert own == [{"to": [{"podSelector": policy["podSelector"]}]}]


def test_the_console_reaches_the_ports_of_the_server_and_has_no_rights() -> None:
    template = CONSOLE["Deployment"]["spec"]["template"]
    pod, (console,) = template["spec"], template["spec"]["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert console["securityContext"] == container(HEAD)["securityContext"]
    options = dict(argument.split("=", 1) for argument in console["args"])
    head = f"http://{SERVICE['metadata']['name']}-head-svc"
    assert options["--server"] == f"{head}:{port(HEAD, 'management')}"
    assert options["--metrics"] == f"{head}:{port(HEAD, 'metrics')}"
    name = SERVICE["spec"]["serveService"]["metadata"]["name"]
    assert options["--inference"] == f"http://{name}:8080"
    assert options["--allowed-host"] == CONSOLE["Service"]["metadata"]["name"]
    known = {parameter.opts[0] for parameter in get_command(app).commands["console"].params}  # type: ignore[attr-defined]
    assert options.keys() <= known
    labels = template["metadata"]["labels"].items()
    opened = {
        allowed["port"]
        for rule in MANIFESTS["network.yaml"]["spec"]["ingress"]
        if any(
            labels >= source["podSelector"]["matchLabels"].items()
            for source in rule.get("from", ())
            if "namespaceSelector" not in source
        )
        for allowed in rule["ports"]
    }
    assert {8081, 8082} <= opened
    needed = {int(options[name].rpartition(":")[2]) for name in ("--server", "--metrics", "--inference")}
    allowed = CONSOLE["NetworkPolicy"]["spec"]["egress"][0]["ports"]
    assert {each["port"] for each in allowed} == needed


def test_groups_scale_within_their_bounds() -> None:
    for group in CLUSTER_SPEC["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert HEAD["rayStartParams"]["num-cpus"] == "0"


def test_registrations_name_objects_of_the_model_buckets() -> None:
    allowed = [re.compile(pattern) for pattern in load(application(SERVE)["args"]).store.allowed_urls or ()]
    assert any(each.fullmatch("s3://torchrelay-models-123456789012-eu-west-1/digits.mar") for each in allowed)
    for url in (
        "s3://other/digits.mar",
        "https://example.com/s3://torchrelay-models-1/a.mar",
        "file:///a.mar",
    ):
        assert not any(each.fullmatch(url) for each in allowed)


def test_ray_s_version_is_the_one_that_is_tested() -> None:
    pins = dict(line.split(";")[0].strip().split("==") for line in _pins())
    assert CLUSTER_SPEC["rayVersion"] == pins["ray"]


def _pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if "==" in line and not line.startswith("#")]
