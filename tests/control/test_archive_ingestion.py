"""From an archive's address to a spec, and when an archive leaves the cache again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.domain.model import Registration
from serve_app.errors import (
    BadRequest,
    ConfigurationError,
    DownloadFailed,
    InvalidArchive,
    LimitExceeded,
    Unavailable,
)
from serve_app.settings import ModelStoreSettings, Settings, TelemetrySettings, load
from tests.support.archives import ECHO, make_archive


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "model_store"
    folder.mkdir()
    return folder


@pytest.fixture
def ingestor(tmp_path: Path, store: Path) -> ArchiveIngestor:
    return ArchiveIngestor(Settings(home=str(tmp_path)))


def kept(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "state/archives").iterdir()}


def test_an_archive_stays_as_long_as_a_version_uses_it(
    tmp_path: Path, store: Path, ingestor: ArchiveIngestor
) -> None:
    make_archive(store, "m", ECHO)
    spec = ingestor.ingest(Registration("m-1.0.mar"))
    assert (spec.name, spec.version) == ("m", "1.0")
    ingestor.remove_unused(frozenset([spec.digest]))
    assert kept(tmp_path) == {spec.digest}
    ingestor.mark_unused(spec.digest)
    ingestor.remove_unused(frozenset())
    assert kept(tmp_path) == set()


def test_a_refused_archive_leaves_when_nobody_is_being_admitted(
    tmp_path: Path, store: Path, ingestor: ArchiveIngestor
) -> None:
    make_archive(store, "m", ECHO)
    with pytest.raises(BadRequest, match="cannot be part of a route"):
        ingestor.ingest(Registration("m-1.0.mar", model_name="no/route"))
    # Refused under one name, it may be on its way in under another: only tidy, which runs alone, removes it.
    assert len(kept(tmp_path)) == 1
    spec = ingestor.ingest(Registration("m-1.0.mar"))
    ingestor.remove_unused(frozenset([spec.digest]))
    assert kept(tmp_path) == {spec.digest}
    with pytest.raises(BadRequest):
        ingestor.ingest(Registration("m-1.0.mar", model_name="no/route"))
    ingestor.remove_unused(frozenset())
    assert kept(tmp_path) == set()


def test_what_a_killed_management_left_behind_goes_with_the_first_tidying(
    tmp_path: Path, store: Path
) -> None:
    make_archive(store, "used", ECHO)
    make_archive(store, "left", ECHO, version="2.0")
    settings = Settings(home=str(tmp_path))
    used = ArchiveIngestor(settings).ingest(Registration("used-1.0.mar"))
    ArchiveIngestor(settings).ingest(Registration("left-2.0.mar"))
    ArchiveIngestor(settings).remove_unused(frozenset([used.digest]))
    assert kept(tmp_path) == {used.digest}


def test_it_tells_how_far_it_has_come(store: Path, ingestor: ArchiveIngestor) -> None:
    archive = make_archive(store, "m", ECHO)
    reported: list[tuple[str, dict]] = []
    ingestor.ingest(
        Registration("m-1.0.mar"), on_progress=lambda stage, **result: reported.append((stage, result))
    )
    size = archive.stat().st_size
    assert reported == [("unpacking", {"bytes": size, "total": size}), ("checking", {})]


def test_keys_without_effect_are_events_of_the_registration(store: Path, ingestor: ArchiveIngestor) -> None:
    config = {"minWorker": 1, "batchSize": "many", "deviceIds": [0]}
    make_archive(store, "m", ECHO, config=config)
    reported: list[dict] = []
    ingestor.ingest(Registration("m-1.0.mar"), on_progress=lambda stage, **result: reported.append(result))
    place = "m-1.0.mar/model-config.yaml"
    assert reported[-1] == {
        "warnings": [
            f"{place}: batchSize: 'many' must be a whole number; it is ignored",
            f"{place}: 'minWorker' is left to the handler; did you mean 'minWorkers'?",
            "m-1.0.mar: deviceIds in its model-config.yaml: not served, and without effect",
        ]
    }


def test_unsupported_keys_are_reported_once(
    store: Path, ingestor: ArchiveIngestor, caplog: pytest.LogCaptureFixture
) -> None:
    requested = {
        "continuousBatching": True,
        "deviceIds": [0],
        "maxNumSequence": 4,
        "torchrun": {},
        "batchSize": 2,
    }
    make_archive(store, "m", ECHO, config=requested)
    ingestor.ingest(Registration("m-1.0.mar"))
    keys = "torchrun, deviceIds"
    assert caplog.messages == [f"m-1.0.mar: {keys} in its model-config.yaml: not served, and without effect"]


@pytest.mark.parametrize("installed", [True, False])
def test_requirements_that_are_not_installed_are_reported_with_the_fix(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture, installed: bool
) -> None:
    requirements = {"requirementsFile": "requirements.txt"}
    make_archive(store, "m", ECHO, files={"requirements.txt": "tinypkg"}, manifest=requirements)
    settings = load({"home": str(tmp_path), "runtime": {"install_py_dep_per_model": installed}})
    ingestor = ArchiveIngestor(settings)
    spec = ingestor.ingest(Registration("m-1.0.mar"))
    assert spec.requirements == ("requirements.txt" if installed else "")
    assert (ingestor.directory(spec) / "requirements.txt").read_text() == "tinypkg"
    assert ["runtime.install_py_dep_per_model" in line for line in caplog.messages] == [True] * (
        not installed
    )


@pytest.mark.parametrize("where", ["parameter", "?sha256=", "#sha256="])
def test_another_digest_is_refused_and_leaves_nothing(
    tmp_path: Path, store: Path, ingestor: ArchiveIngestor, where: str
) -> None:
    archive = make_archive(store, "m", ECHO)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()

    def registration(digest: str) -> Registration:
        if where == "parameter":
            return Registration(archive.name, sha256=digest)
        return Registration(f"{archive.name}{where}{digest}")

    with pytest.raises(InvalidArchive, match=f"sha256 is {digest} and should be {'0' * 64}"):
        ingestor.ingest(registration("0" * 64))
    assert kept(tmp_path) == set() and list((tmp_path / "state/models").iterdir()) == []
    with pytest.raises(BadRequest, match="64 hex digits"):
        ingestor.ingest(registration("abc"))
    spec = ingestor.ingest(registration(digest.upper()))
    assert (spec.digest, spec.url) == (digest, registration(digest.upper()).url)
    with pytest.raises(BadRequest, match="differs between"):
        ingestor.ingest(Registration(f"{archive.name}?sha256={digest}", sha256="0" * 64))


def test_the_digest_of_a_folder_is_that_of_its_packed_form(store: Path, ingestor: ArchiveIngestor) -> None:
    (store / "folder").mkdir()
    (store / "folder/handler.py").write_text(ECHO)
    registration = Registration("folder", handler="handler.py", trusted=True)
    digest = ingestor.ingest(registration).digest
    assert ingestor.ingest(dataclasses.replace(registration, sha256=digest)).digest == digest
    (store / "folder/handler.py").write_text("import os" + ECHO)
    with pytest.raises(InvalidArchive, match="and should be"):
        ingestor.ingest(dataclasses.replace(registration, sha256=digest))


@pytest.mark.parametrize(("trusted", "patterns"), [(True, []), (False, ["fol*"]), (False, [])])
def test_only_the_registration_and_the_settings_trust_a_folder(
    tmp_path: Path, store: Path, trusted: bool, patterns: list[str]
) -> None:
    (store / "folder").mkdir()
    (store / "folder/handler.py").write_text(ECHO)
    (store / "folder/model-config.yaml").write_text("trusted: true\n")
    ingestor = ArchiveIngestor(load({"home": str(tmp_path), "store": {"trusted": patterns}}))
    registration = Registration("folder", handler="handler.py", trusted=trusted)
    if trusted or patterns:
        assert ingestor.ingest(registration).config == {"trusted": True}
    else:
        with pytest.raises(InvalidArchive, match="code of a model without a manifest"):
            ingestor.ingest(registration)


def test_a_store_that_does_not_answer_leaves_nothing_behind(tmp_path: Path, store: Path) -> None:
    options = {"endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "s"}
    ingestor = ArchiveIngestor(load({"home": str(tmp_path), "store": {"storage_options": {"s3": options}}}))
    with pytest.raises(DownloadFailed) as error:
        ingestor.ingest(Registration("s3://models/m.mar"))
    assert "127.0.0.1:1" in error.value.detail
    assert kept(tmp_path) == set()
    assert list(store.iterdir()) == []
    assert list((tmp_path / "state/partial").iterdir()) == []


@pytest.mark.parametrize(("config", "result"), [({}, True), ({"num_gpus": 0.5}, False)])
def test_a_model_that_uses_a_gpu_without_claiming_one_is_reported(
    store: Path, ingestor: ArchiveIngestor, caplog: pytest.LogCaptureFixture, config: dict, result: bool
) -> None:
    make_archive(store, "m", ECHO, config={"deviceType": "gpu", **config})
    ingestor.ingest(Registration("m-1.0.mar"))
    assert ["claims no GPU" in line for line in caplog.messages] == [True] * result


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("none", []),
        ("", []),
        (" a.mar , n=b.mar ,", [("a.mar", None), ("b.mar", "n")]),
        ("m=1.mar,m=2.mar", [("1.mar", "m"), ("2.mar", "m")]),
        ("n=https://host/a.mar?version=3", [("https://host/a.mar?version=3", "n")]),
        ("https://host/a.mar?version=3", [("https://host/a.mar?version=3", None)]),
    ],
)
def test_start_up_loads_the_configured_models(
    tmp_path: Path, wanted: str, expected: list[tuple[str, str | None]]
) -> None:
    ingestor = ArchiveIngestor(load({"home": str(tmp_path), "control": {"load_models": wanted}}))
    assert [
        (requested.url, requested.model_name) for requested in ingestor.startup_registrations()
    ] == expected


@pytest.mark.parametrize(
    ("name", "problem"), [("file", "it is a file; set store.model_store"), ("n" * 300, "File name too long")]
)
def test_a_model_store_that_cannot_be_read_is_an_error(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "file").touch()
    ingestor = ArchiveIngestor(load({"home": str(tmp_path), "store": {"model_store": name}}))
    with pytest.raises(ConfigurationError, match=f"model store {tmp_path}.*{problem}"):
        ingestor.startup_registrations()


def test_a_model_folder_is_admitted_with_its_task_and_no_archive(
    store: Path, ingestor: ArchiveIngestor
) -> None:
    folder = store / "entities"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["BertForTokenClassification"]}')
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    spec = ingestor.ingest(Registration("entities"))
    assert (spec.name, spec.version, spec.handler) == ("entities", "1.0", "huggingface")
    assert spec.config == {"task": "token-classification"}
    assert (ingestor.directory(spec) / "config.json").is_file()
    requested = ingestor.ingest(Registration("entities", model_name="vectors", task="feature-extraction"))
    assert (requested.name, requested.config) == ("vectors", {"task": "feature-extraction"})
    everything = load({"home": str(store.parent), "control": {"load_models": "all"}})
    assert [registration.url for registration in ArchiveIngestor(everything).startup_registrations()] == [
        "entities"
    ]


@pytest.mark.parametrize("file", ["model-config.yaml", "MAR-INF/MANIFEST.json"])
def test_a_document_of_more_than_1_mib_is_refused_before_it_is_parsed(
    store: Path, ingestor: ArchiveIngestor, file: str
) -> None:
    path = make_archive(store, "m", ECHO, config={"batchSize": 2})
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents[file] += b" " * (1 << 20)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    with pytest.raises(BadRequest, match=f"{file} is larger than 1048576 bytes"):
        ingestor.ingest(Registration("m-1.0.mar"))


def test_a_number_beyond_its_limit_leaves_nothing_behind(
    tmp_path: Path, store: Path, ingestor: ArchiveIngestor
) -> None:
    make_archive(store, "m", ECHO, config={"minWorkers": 1_000_000})
    with pytest.raises(LimitExceeded, match="minWorkers is 1000000"):
        ingestor.ingest(Registration("m-1.0.mar"))
    ingestor.remove_unused(frozenset())
    assert kept(tmp_path) == set()


@pytest.mark.parametrize("key", ["min-workers", "max-workers", "batch-size", "max-batch-delay"])
@pytest.mark.parametrize("place", ["shared", "own"])
def test_the_models_of_a_workflow_have_the_same_limits(
    store: Path, ingestor: ArchiveIngestor, key: str, place: str
) -> None:
    shared, own = ({key: 10**9}, {}) if place == "shared" else ({}, {key: 10**9})
    specification = {"models": {**shared, "a": {"url": "absent.mar", **own}}, "dag": {"a": []}}
    manifest = {"workflow": {"workflowName": "wf", "specFile": "spec.yaml"}}
    with zipfile.ZipFile(store / "wf.war", "w") as archive:
        archive.writestr("WAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("spec.yaml", json.dumps(specification))
    with pytest.raises(LimitExceeded, match="model wf__a: "):
        ingestor.ingest_workflow(Registration("wf.war"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Provide a file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tests", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_unavailable_and_the_archive_is_accepted_once_there_is_space(
    small_disk: Path, store: Path
) -> None:
    settings = Settings(home=str(small_disk), store=ModelStoreSettings(model_store=str(store)))
    ingestor = ArchiveIngestor(settings)
    make_archive(store, "m", ECHO, files={"weights": os.urandom(100_000)})
    (small_disk / "ballast").write_bytes(bytes(1_000_000))
    with pytest.raises(Unavailable, match=r"m-1\.0\.mar cannot be stored: No space left .*register it again"):
        ingestor.ingest(Registration("m-1.0.mar"))
    (small_disk / "ballast").unlink()
    assert ingestor.ingest(Registration("m-1.0.mar")).name == "m"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"sample": 2}, ("sample", "2", "from 0 to 1")),
        ({"destination": "s3://bucket/x"}, ("s3://bucket/x", "telemetry.capture_destinations")),
        ({"destination": "/data"}, ("/data", "telemetry.capture_destinations")),
        ({"reference_version": "1.0"}, ("reference_version", "1.0", "this version itself")),
        ({"reference": "none.jsonl"}, ("none.jsonl", "not in the archive")),
        ({"reference": "broken.jsonl"}, ("broken.jsonl", "line 2")),
    ],
)
def test_an_invalid_capture_is_refused_at_the_registration(
    store: Path, ingestor: ArchiveIngestor, policy: dict[str, Any], words: tuple[str, ...]
) -> None:
    files: dict[str, str | bytes] = {"broken.jsonl": '{"age": 1}\n{"age":'}
    make_archive(store, "m", ECHO, files=files, config={"capture": policy})
    with pytest.raises((ConfigurationError, InvalidArchive)) as error:
        ingestor.ingest(Registration("m-1.0.mar"))
    for word in words:
        assert word in str(error.value)


def test_a_valid_capture_belongs_to_the_spec(tmp_path: Path, store: Path) -> None:
    settings = Settings(home=str(tmp_path), telemetry=TelemetrySettings(capture_destinations=("/data/.*",)))
    policy = {"destination": "/data/captured", "reference": "ages.jsonl", "sample": 0.5}
    make_archive(store, "m", ECHO, files={"ages.jsonl": '{"age": 1}'}, config={"capture": policy})
    capture = ArchiveIngestor(settings).ingest(Registration("m-1.0.mar")).capture
    assert capture is not None
    assert (capture.sample, capture.destination, capture.reference) == (0.5, "/data/captured", "ages.jsonl")
