"""KServe's manifests agree with the command that they start and with the image."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from serve_app.cli import kserve, torchserve
from serve_app.cli.torchserve_flags import TorchServeFlags, translate
from serve_app.settings import load

CLUSTER = Path(__file__).parents[2] / "cluster"
RUNTIME, MODEL = yaml.safe_load_all((CLUSTER / "kserve.yaml").read_text())
(CONTAINER,) = RUNTIME["spec"]["containers"]


def test_the_model_is_one_of_the_runtime_s() -> None:
    model = MODEL["spec"]["predictor"]["model"]
    assert (RUNTIME["kind"], MODEL["kind"]) == ("ClusterServingRuntime", "InferenceService")
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["modelFormat"]["name"] in [kind["name"] for kind in RUNTIME["spec"]["supportedModelFormats"]]
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]


@pytest.mark.parametrize("protocol", RUNTIME["spec"]["protocolVersions"])
def test_its_arguments_start_a_server_on_its_ports(tmp_path: Path, protocol: str) -> None:
    for folder in ("model-store", "config"):
        (tmp_path / folder).mkdir()
    (tmp_path / "config/config.properties").write_text("inference_address=http://0.0.0.0:8085\n")
    assert CONTAINER["args"][:1] == ["torchserve"]
    words = [word.replace("/mnt/models", str(tmp_path)) for word in CONTAINER["args"][1:]]
    args = torchserve._parser().parse_args(words)
    assert args.start and not args.foreground, "the image's entrypoint keeps it there"
    (variable,) = CONTAINER["env"]
    environment = {variable["name"]: "", kserve.VARIABLE: protocol}
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
    assert MODEL["spec"]["predictor"]["automountServiceAccountToken"] is False
    assert CONTAINER["image"].partition(":")[0] == "torchrelay"


def test_what_it_mounts_is_there() -> None:
    mounted = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in RUNTIME["spec"]["volumes"]}
    assert mounted["shm"] == "/dev/shm"
    assert {"/tmp", "/srv/torchrelay", "/home/torchrelay"} < set(mounted.values())
