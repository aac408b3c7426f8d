"""The archives of candidates."""

from __future__ import annotations

import json
from pathlib import Path

from serve_app.load_test.candidate import Candidate
from serve_app.load_test.candidate_deployments import read_config, write_archive
from serve_app.model_store.cache import unpack
from serve_app.settings import ModelStoreSettings
from tests.support.archives import ECHO, make_archive

CANDIDATE = Candidate("plain", 2, 1, 8, 5)
VALUES = {"minWorkers": 2, "maxWorkers": 2, "batchSize": 8, "maxBatchDelay": 5, "threads": 1}


def test_an_archive_has_the_values_of_its_candidate(tmp_path: Path) -> None:
    settings = ModelStoreSettings()
    config = {"batchSize": 1, "responseTimeout": 9, "autoscaling": {"policy": "requests"}}
    directory = unpack(make_archive(tmp_path, "echo", ECHO, config=config), tmp_path / "echo", settings)
    write_archive(directory, CANDIDATE, tmp_path / "new.mar", "1.1")
    assert read_config(directory) == config  # although the files of the copy are links
    made = unpack(tmp_path / "new.mar", tmp_path / "new", settings)
    assert read_config(made) == {**VALUES, "responseTimeout": 9}
    model = json.loads((made / "MAR-INF/MANIFEST.json").read_text())["model"]
    assert (model["modelVersion"], model["handler"]) == ("1.1", "handler.py")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["echo", "echo-1.0.mar", "new", "new.mar"]


def test_an_archive_without_a_configuration_gets_one(tmp_path: Path) -> None:
    settings = ModelStoreSettings()
    directory = unpack(make_archive(tmp_path, "echo", ECHO), tmp_path / "echo", settings)
    write_archive(directory, CANDIDATE, tmp_path / "new.mar")
    made = unpack(tmp_path / "new.mar", tmp_path / "new", settings)
    assert read_config(made) == VALUES
    assert json.loads((made / "MAR-INF/MANIFEST.json").read_text())["model"]["modelVersion"] == "1.0"


def test_a_model_folder_stays_without_a_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_archive(folder, CANDIDATE, tmp_path / "new.mar")
    made = unpack(tmp_path / "new.mar", tmp_path / "new", ModelStoreSettings())
    assert sorted(path.name for path in made.iterdir()) == ["config.json", "model-config.yaml"]
    assert read_config(made) == VALUES
