"""Descriptions of models over TorchServe's REST management API."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from serve_app.domain.model import ReplicaInfo
from serve_app.errors import NoReplica
from tests.support.torchserve_management import WORKER, make_spec, parse_error

FULL = b"""[
  {
    "modelName": "noop",
    "modelVersion": "1.11",
    "modelUrl": "noop.mar",
    "runtime": "python",
    "minWorkers": 1,
    "maxWorkers": 1,
    "batchSize": 1,
    "maxBatchDelay": 100,
    "responseTimeout": 120,
    "startupTimeout": 120,
    "maxRetryTimeoutInSec": 300,
    "clientTimeoutInMills": 0,
    "parallelType": "",
    "parallelLevel": 0,
    "deviceType": "gpu",
    "deviceIds": [
      0
    ],
    "continuousBatching": false,
    "useJobTicket": false,
    "useVenv": false,
    "stateful": false,
    "sequenceMaxIdleMSec": 0,
    "sequenceTimeoutMSec": 0,
    "maxNumSequence": 0,
    "maxSequenceJobQueueSize": 0,
    "loadedAtStartup": false,
    "workers": [
      {
        "id": "9000",
        "startTime": "2018-10-02T13:44:53.034Z",
        "status": "READY",
        "memoryUsage": 89247744,
        "pid": 98972,
        "gpu": false,
        "gpuUsage": "N/A"
      }
    ],
    "jobQueueStatus": {
      "remainingCapacity": 100,
      "pendingRequests": 0
    },
    "customizedMetadata": {
      "data1": "1",
      "data2": "2"
    }
  }
]
"""


def test_describe_to_the_byte(management) -> None:
    app = management()
    spec = make_spec(min_workers=1, max_workers=1, device_type="gpu", device_ids=(0,))
    app.control_api.put(replace(spec, digest=""), WORKER)
    app.control_api.metadata = {"data1": "1", "data2": "2"}
    response = app("GET", "/models/noop?customized=true")
    assert (response.status, response.body) == (200, FULL)
    assert response["pragma"] == "no-cache"


def test_describe_says_what_the_models_own_file_does(management) -> None:
    app = management()
    reported = make_spec(
        parallel_type="custom",
        parallel_level=2,
        continuous_batching=True,
        use_job_ticket=True,
        use_venv=True,
        sequence_batching=True,
        sequence_max_idle=3,
        sequence_timeout=4,
        max_num_sequence=5,
        max_sequence_job_queue_size=6,
    )
    app.control_api.put(reported)
    [model] = json.loads(app("GET", "/models/noop").body)
    assert (model["parallelType"], model["parallelLevel"]) == ("custom", 2)
    flags = ("continuousBatching", "useJobTicket", "useVenv", "stateful")
    assert [model[key] for key in flags] == [True] * 4
    numbers = ("sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize")
    assert [model[key] for key in numbers] == [3, 4, 5, 6]


@pytest.mark.parametrize("path", ["/models", "/models/noop", "/models/noop/all"])
def test_urls_are_shown_without_credentials(management, path: str) -> None:
    app = management()
    url = "https://user:secret@host/noop.mar?X-Amz-Signature=secret"
    app.control_api.put(replace(make_spec(), url=url))
    response = app("GET", path)
    assert response.status == 200
    assert b'"modelUrl": "https://host/noop.mar"' in response.body and b"secret" not in response.body


def test_describe_omits_missing_fields(management) -> None:
    app = management()
    app.control_api.put(make_spec())
    [model] = json.loads(app("GET", "/models/noop").body)
    assert not {"deviceIds", "customizedMetadata", "lastError", "engine"} & set(model)
    assert (model["workers"], model["deviceType"], model["jobQueueStatus"]["remainingCapacity"]) == (
        [],
        "cpu",
        100,
    )


def test_describe_has_the_last_error_and_the_desired_workers(management) -> None:
    app = management()
    gpu = ReplicaInfo("w1", 1, 0.0, False, 5, "0,1")
    app.control_api.put(
        make_spec(max_batch_delay=0, num_gpus=1.0), gpu, last_error="Traceback: no module named foo"
    )
    [model] = json.loads(app("GET", "/models/noop/1.11").body)
    assert list(model)[-1] == "lastError"
    assert (model["lastError"], model["maxBatchDelay"]) == ("Traceback: no module named foo", 0)
    assert model["deviceType"] == "gpu"
    assert model["workers"][0] == {
        "id": "w1",
        "startTime": "1970-01-01T00:00:00.000Z",
        "status": "UNLOADING",
        "memoryUsage": 5,
        "pid": 1,
        "gpu": True,
        "gpuUsage": "gpuId::0,1",
    }


def test_describe_all_versions(management) -> None:
    app = management()
    app.control_api.put(make_spec(version="1.0"))
    app.control_api.put(make_spec(version="2.0"))
    app.control_api.metadata = {"asked": "never"}
    found = json.loads(app("GET", "/models/noop/all?customized=true").body)
    assert [model["modelVersion"] for model in found] == ["1.0", "2.0"]
    assert "customizedMetadata" not in found[0]
    assert parse_error(app("GET", "/models/none/all"))[2] == "Model not found: none"


@pytest.mark.parametrize(("metadata", "shown"), [("text", {}), ([1], {}), ({}, {})])
def test_metadata_is_an_object_or_empty(management, metadata: object, shown: dict) -> None:
    app = management()
    app.control_api.put(make_spec())
    app.control_api.metadata = metadata
    assert json.loads(app("GET", "/models/noop/1.11?customized=TRUE").body)[0]["customizedMetadata"] == shown


def test_metadata_needs_a_worker(management) -> None:
    app = management()
    app.control_api.put(make_spec())
    app.control_api.metadata = NoReplica("noop", None, "")
    assert parse_error(app("GET", "/models/noop?customized=true")) == (
        503,
        "ServiceUnavailableException",
        'Model "noop" has no worker to serve describe request. Please use scale workers API to add workers.',
    )
