"""Models and snapshots of a config.properties."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from serve_app.errors import ConfigurationError
from serve_app.settings import VersionSettings, load
from serve_app.torchserve_config import KEYS, ListenAddress, parse, read

ROOT = Path(__file__).parents[2]


def values(text: str) -> dict[str, str]:
    return {key: entry.value for key, entry in parse(text).items()}


MODELS = """
load_models=noop.mar
models={\\
  "noop": {\\
    "1.11": {\\
        "defaultVersion": true,\\
        "marName": "noop.mar",\\
        "minWorkers": 1,\\
        "maxWorkers": 2,\\
        "batchSize": 4,\\
        "maxBatchDelay": 100,\\
        "responseTimeout": 0,\\
        "startupTimeout": 60,\\
        "runtimeType": "python"\\
    }\\
  }\\
}
"""


class TestModels:
    def test_values_of_one_version(self) -> None:
        control = read(MODELS).settings.control
        assert control.load_models == "noop.mar"
        assert control.models == {
            "noop": {"1.11": VersionSettings(True, 1, 2, 4, 100, None, 60)},
        }

    def test_a_snapshot_is_loaded_as_it_was(self) -> None:
        snapshot = """model_snapshot={"name":"x.cfg","modelCount":2,"created":1594369765658,"models":{\\
            "m":{"1.0":{"defaultVersion":false,"marName":"m1.mar","minWorkers":0,"maxWorkers":0,"batchSize":1},\\
                 "2.0":{"defaultVersion":true,"marName":"m2.mar","minWorkers":2,"maxWorkers":2,"batchSize":1}}}}
            load_models=all"""
        reading = read(snapshot)
        control = reading.settings.control
        assert control.load_models == "m=m1.mar,m=m2.mar"
        assert control.models["m"]["1.0"].min_workers == 0
        assert control.models["m"]["2.0"] == VersionSettings(True, 2, 2, 1)
        assert [note.remark for note in reading.notes if note.key == "load_models"] == [
            "ignored, as by TorchServe with a model_snapshot"
        ]

    def test_a_snapshot_as_java_writes_it(self) -> None:
        reading = read(
            "#Saving snapshot\n"
            r"inference_address=http\://127.0.0.1\:21080"
            "\n"
            r'model_snapshot={\n  "name"\: "x-shutdown.cfg",\n  "modelCount"\: 1,\n  "models"\: {\n   '
            r' "echo"\: {\n'
            r'      "1.0"\: {\n        "defaultVersion"\: true,\n        "marName"\: "echo.mar",\n'
            r'        "minWorkers"\: 2,\n        "maxWorkers"\: 2,\n        "runtimeType"\: "python"\n    '
            r"  }\n"
            r"    }\n  }\n}"
            "\nmodel_store=store\nworkflow_store=store\nversion=0.12.0\nload_models=\nnumber_of_gpu=0\n"
            "tsConfigFile=config.properties\npython=/usr/bin/python\n"
        )
        assert reading.inference == ListenAddress("127.0.0.1", 21080)
        assert reading.settings.control.load_models == "echo=echo.mar"
        assert reading.settings.control.models["echo"]["1.0"] == VersionSettings(True, 2, 2)
        assert reading.warnings == ()

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ('{"m": {"1.0": {"minWorkers": 3, "maxWorkers": 2}}}', ["m 1.0", "minWorkers 3", "maxWorkers 2"]),
            ('{"m": {"1.0": 3}}', ["'m'", "'1.0'", "object"]),
            ('{"m": []}', ["'m'", "object of versions"]),
            ("[]", ["list", "object of models"]),
            ('{"m": ', ["is not JSON", "backslash"]),
        ],
    )
    def test_that_cannot_be(self, value: str, words: list[str]) -> None:
        with pytest.raises(ConfigurationError) as refused:
            read(f"models={value}", "c")
        assert [word for word in ["c: line 1: models: ", *words] if word not in str(refused.value)] == []

    @pytest.mark.parametrize(
        "value",
        [
            '{"m": {"1.0": {"batchSize": "4", "defaultVersion": "true"}}}',
            '{"m": {"1.0": {"batchSize": 4.0, "defaultVersion": true}}}',
            "{'m': {'1.0': {'batchSize': 4, 'defaultVersion': 'TRUE'}}}",
            "{m: {1.0: {batchSize: 4; defaultVersion = true}}} # as it was",
            '{m:{"1.0":{batchSize:"4",defaultVersion:true}}}',
        ],
    )
    def test_json_and_numbers_are_read_as_by_gson(self, value: str) -> None:
        assert read(f"models={value}", "c").settings.control.models["m"]["1.0"] == VersionSettings(
            True, batch_size=4
        )

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ('{"batchSize": "four"}', "batchSize: 'four'"),
            ('{"batchSize": [4]}', "batchSize: [4]"),
            ('{"defaultVersion": []}', "defaultVersion: []"),
            ('{"maxWorkers": true}', "maxWorkers: True"),
        ],
    )
    def test_a_wrong_value_is_ignored_with_a_warning(self, value: str, expected: str) -> None:
        reading = read(f'models={{"m": {{"1.0": {value}}}}}', "c")
        assert reading.settings.control.models["m"]["1.0"] == VersionSettings()
        assert f"c: line 1: models: m 1.0: {expected} is ignored" in reading.warnings[0]

    def test_an_unknown_value_is_named(self) -> None:
        [warning] = read('models={"m":{"1.0":{"minWorker":1}}}', "c").warnings
        assert warning == "c: line 1: models: m 1.0: unknown key 'minWorker'; did you mean 'minWorkers'?"


def test_every_setting_that_is_named_is_there() -> None:
    settings = load({})
    for key in KEYS:
        if key.fate != "setting":
            assert key.becomes, key.name
            continue
        for path in key.becomes.split("`")[1::2]:
            room, _, name = path.partition(".")
            if room not in ("http_options", ""):
                assert name in {field.name for field in dataclasses.fields(getattr(settings, room))}, key.name
