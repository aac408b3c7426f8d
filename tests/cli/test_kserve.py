"""The command `torchserve` as KServe's runtime starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.server_process import StartError
from serve_app.cli.torchserve_flags import TorchServeFlags, translate
from serve_app.settings import Settings, load

# A file of a KServe user.
PROPERTIES = """
inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:8082
grpc_inference_port=7070
grpc_management_port=7071
enable_envvars_config=true
install_py_dep_per_model=true
metrics_format=prometheus
number_of_netty_threads=4
job_queue_size=10
model_store=/mnt/models/model-store
model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"m":{"1.0":{"defaultVersion":true,"marName":"m.mar",\
"minWorkers":1,"maxWorkers":5,"batchSize":1,"maxBatchDelay":10,"responseTimeout":120}}}}
"""


class Pod:
    def __init__(self, folder: Path) -> None:
        self.folder, self.mount = folder / "home", folder / "mnt/models"
        self.folder.mkdir()
        (self.mount / "model-store").mkdir(parents=True)
        (self.mount / "config").mkdir()
        self.text = PROPERTIES

    def settings_of(self, **environment: str) -> tuple[dict[str, Any], Settings]:
        config = self.mount / "config/config.properties"
        config.write_text(self.text)
        flags = TorchServeFlags(ts_config=str(config), model_store=str(self.mount / "model-store"))
        document = dict(translate(flags, environment, self.folder).document)
        return document["http_options"], load(document["applications"][0]["args"])


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


@pytest.mark.parametrize(
    ("protocol", "envelope"), [("v1", "kserve"), ("v2", "kservev2"), ("grpc-v2", "kservev2")]
)
def test_protocol_sets_addresses_and_envelope(pod: Pod, protocol: str, envelope: str) -> None:
    http, settings = pod.settings_of(PROTOCOL_VERSION=protocol, TS_SERVICE_ENVELOPE="")
    assert (http["host"], http["port"]) == ("0.0.0.0", 8080)
    assert (settings.management.host, settings.management.port) == ("127.0.0.1", 8085)
    assert (settings.management.metrics_host, settings.management.metrics_port) == ("0.0.0.0", 8082)
    assert settings.runtime.service_envelope == envelope
    assert settings.auth.mode == "off" and not settings.inference.serve_management
    assert settings.control.load_models == "m=m.mar"
    assert settings.control.models["m"]["1.0"].max_workers == 5
    grpc = ("0.0.0.0", 8081) if protocol == "grpc-v2" else ("127.0.0.1", 7070)
    assert (settings.grpc.host, settings.grpc.port) == grpc


def test_label_and_file_take_precedence(pod: Pod) -> None:
    pod.text = PROPERTIES.replace("enable_envvars_config=true", "service_envelope=json")
    assert (
        pod.settings_of(PROTOCOL_VERSION="v1", TS_SERVICE_ENVELOPE="body")[1].runtime.service_envelope
        == "body"
    )
    assert pod.settings_of(PROTOCOL_VERSION="v1")[1].runtime.service_envelope == "json"
    pod.text += "\ndisable_token_authorization=false\nmetrics_address=http://127.0.0.1:9999\n"
    settings = pod.settings_of(PROTOCOL_VERSION="v1")[1]
    assert (settings.auth.mode, settings.management.metrics_port) == ("on", 9999)
    http, _ = pod.settings_of(PROTOCOL_VERSION="v1", TS_INFERENCE_ADDRESS="http://127.0.0.1:9000")
    assert http["port"] == 9000


def test_outside_kserve_the_file_holds(pod: Pod) -> None:
    http, settings = pod.settings_of(TS_SERVICE_ENVELOPE="kserve")
    assert http["port"] == 8085 and settings.inference.serve_management and settings.auth.mode == "on"


def test_unknown_protocol_is_refused(pod: Pod) -> None:
    with pytest.raises(StartError, match="PROTOCOL_VERSION=v3: KServe's protocols are v1, v2, grpc-v2"):
        pod.settings_of(PROTOCOL_VERSION="v3")
