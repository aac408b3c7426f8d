"""The benchmark's archives, built by the real archiver."""

from __future__ import annotations

import json
import runpy
import sys
import zipfile

import pytest
import torch

from tests.benchmarks import archives, sequence_lengths

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return archives.build(tmp_path_factory.mktemp("archives"))


@pytest.mark.parametrize("name", archives.MODELS)
def test_an_archive_holds_what_its_manifest_names(built, name):
    model = archives.MODELS[name]
    with zipfile.ZipFile(built[name]) as archive:
        manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))["model"]
        assert (manifest["modelName"], manifest["handler"]) == (name, model.handler)
        for key in ("handler", "modelFile", "serializedFile"):
            named = manifest.get(key)
            assert named in (None, "image_classifier") or archive.getinfo(named)
        if model.model_file:
            with archive.open(manifest["serializedFile"]) as weights:
                model.build().load_state_dict(torch.load(weights))


def test_nothing_but_archives_is_left_in_the_folder(built):
    folder = built["mlp"].parent
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.mar" for name in archives.MODELS)


def test_the_weights_are_the_same_in_every_build():
    first, second = (archives.MODELS["mlp"].build().state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_sample_bodies_are_what_the_models_take():
    assert len(archives.MODELS["echo"].body) == 100
    for name, shape in (("mlp", (1, 10)), ("encoder", (1, 8))):
        model = archives.MODELS[name]
        row = json.loads(model.body)
        assert len(row) == 64
        with torch.inference_mode():
            assert model.build()(torch.tensor([row])).shape == shape


def test_sentences_of_all_lengths_go_into_their_encoder_and_padding_changes_no_answer():
    bodies = sequence_lengths.bodies()
    sizes = [len(json.loads(body)) for body in bodies]
    assert (min(sizes), max(sizes)) == (
        sequence_lengths.SHORTEST,
        sequence_lengths.LONGEST,
    ) and bodies == sequence_lengths.bodies()
    short, long = (torch.tensor(json.loads(body)) for body in sorted(bodies, key=len)[::400])
    model = archives.MODELS["sentences"].build()
    with torch.inference_mode():
        alone = model(short.unsqueeze(0))[0]
        together = model(torch.nn.utils.rnn.pad_sequence([short, long], batch_first=True))
    assert together.shape == (2, 384)
    torch.testing.assert_close(alone, together[0], rtol=1e-4, atol=1e-5)


def test_a_bucketed_archive_differs_by_its_configuration_alone(built, tmp_path):
    copy = sequence_lengths.bucketed(built["sentences"], tmp_path)
    with zipfile.ZipFile(built["sentences"]) as old, zipfile.ZipFile(copy) as new:
        assert new.read("model-config.yaml") == b"bucket_by_length: true\n"
        assert {*new.namelist()} - {*old.namelist()} == {"model-config.yaml"}
        manifest = json.loads(new.read("MAR-INF/MANIFEST.json"))["model"]
        assert manifest.pop("configFile") == "model-config.yaml"
        assert manifest == json.loads(old.read("MAR-INF/MANIFEST.json"))["model"]


def test_the_photograph_is_one_and_goes_into_the_network():
    model = archives.MODELS["resnet"]
    assert 90_000 < len(model.body) < 110_000 and model.body == archives.photograph()
    batch = model.batch()
    assert batch.shape == (8, 3, 224, 224)
    with torch.inference_mode():
        assert model.build()(batch[:1]).shape == (1, 1000)


def test_the_echo_handler_answers_row_by_row():
    handle = runpy.run_path(str(archives._SOURCES / "echo.py"))["handle"]
    assert handle([{"body": {"a": 1}}, {"data": [2]}], None) == [{"a": 1}, [2]]
    assert handle(None, None) is None


def test_a_check_tells_right_answers_from_wrong_ones():
    assert archives.MODELS["echo"].check(json.loads(archives.MODELS["echo"].body))
    assert not archives.MODELS["echo"].check({"text": ""})
    assert archives.MODELS["mlp"].check({"class": 1, "logits": [0.0, 2.0, *[1.0] * 8]})
    assert not archives.MODELS["mlp"].check({"class": 0, "logits": [0.0, 2.0, *[1.0] * 8]})


def test_without_the_archiver_the_error_names_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(archives.ArchiveFailed, match="pip install torch-model-archiver"):
        archives.build(tmp_path, ("echo",))
