"""KServe's manifests agree with the command that they start and with the image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli import kserve, torchserve
from serve_app.cli.torchserve_flags import TorchServeFlags, translate
from serve_app.settings import load

KSERVE = Path(__file__).parents[2] / "cluster/kserve"
RUNTIME = yaml.safe_load((KSERVE / "runtime.yaml").read_text())
ACCOUNT, *MODELS = yaml.safe_load_all((KSERVE / "models.yaml").read_text())
(CONTAINER,) = RUNTIME["spec"]["containers"]


@pytest.mark.parametrize("service", MODELS, ids=lambda service: service["metadata"]["name"])
def test_the_model_is_one_of_the_runtime_s(service: dict[str, Any]) -> None:
    predictor, model = service["spec"]["predictor"], service["spec"]["predictor"]["model"]
    assert (RUNTIME["kind"], service["kind"]) == ("ClusterServingRuntime", "InferenceService")
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["modelFormat"]["name"] in [kind["name"] for kind in RUNTIME["spec"]["supportedModelFormats"]]
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]
    assert model["storageUri"].startswith("s3://torchrelay-models-")
    assert predictor["serviceAccountName"] == ACCOUNT["metadata"]["name"]
    assert predictor["automountServiceAccountToken"] is ACCOUNT["automountServiceAccountToken"] is False


def test_both_rest_protocols_have_a_model() -> None:
    versions = [service["spec"]["predictor"]["model"]["protocolVersion"] for service in MODELS]
    assert versions == ["v1", "v2"]


def test_the_server_knows_that_it_is_kserves() -> None:
    """KServe sets PROTOCOL_VERSION for runtimes with this annotation; without it a default applies."""
    assert RUNTIME["metadata"]["annotations"] == {"serving.kserve.io/server-type": "torchserve"}
    defaults = {each["name"]: each["value"] for each in CONTAINER["env"]}
    assert kserve.overrides({kserve.VARIABLE: defaults[kserve.VARIABLE]}, "", "config.properties")


@pytest.mark.parametrize("protocol", RUNTIME["spec"]["protocolVersions"])
def test_its_arguments_start_a_server_on_its_ports(tmp_path: Path, protocol: str) -> None:
    for folder in ("model-store", "config"):
        (tmp_path / folder).mkdir()
    (tmp_path / "config/config.properties").write_text("inference_address=http://0.0.0.0:8085\n")
    assert CONTAINER["args"][:1] == ["torchserve"]
    words = [word.replace("/mnt/models", str(tmp_path)) for word in CONTAINER["args"][1:]]
    args = torchserve._parser().parse_args(words)
    assert args.start and not args.foreground, "the image's entrypoint keeps it there"
    environment = {"TS_SERVICE_ENVELOPE": "", kserve.VARIABLE: protocol}
    assert environment.keys() == {each["name"] for each in CONTAINER["env"]}
    made = translate(TorchServeFlags(args.ts_config, args.model_store), environment, tmp_path)
    port = made.document["http_options"]["port"]
    assert {CONTAINER[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {port}
    management = load(made.document["applications"][0]["args"]).management
    assert RUNTIME["spec"]["annotations"]["prometheus.kserve.io/port"] == str(management.metrics_port)


def test_it_runs_without_rights() -> None:
    context = CONTAINER["securityContext"]
    assert context["runAsNonRoot"] and context["capabilities"] == {"drop": ["ALL"]}
    assert not context["privileged"] and not context["allowPrivilegeEscalation"]
    assert context["readOnlyRootFilesystem"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert CONTAINER["image"].partition(":")[0] == "torchrelay"


def test_what_it_mounts_is_there() -> None:
    mounted = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in RUNTIME["spec"]["volumes"]}
    assert mounted["shm"] == "/dev/shm"
    assert {"/tmp", "/srv/torchrelay", "/home/torchrelay"} < set(mounted.values())
    assert CONTAINER["workingDir"] in mounted.values(), "logs and registry are in the working directory"
