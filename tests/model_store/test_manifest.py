"""Manifests and configurations: read as TorchServe reads them, checked before anything starts."""

import dataclasses
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from serve_app.errors import ConfigurationError, InvalidArchive
from serve_app.model_store.archive import Archive, Manifest, ModelConfig, archive_stem
from serve_app.model_store.cache import unpack
from serve_app.model_store.model_check import check_model
from serve_app.settings import ModelStoreSettings

HANDLER = "def handle(data, context):\n    return data\n"
MODEL = {"modelName": "echo", "modelVersion": "1.0", "handler": "handler.py"}


@pytest.fixture
def write(tmp_path):
    """``write(model, files)``: an unpacked model with this manifest (None: with none)."""

    def write(model=MODEL, files=None, **manifest):
        for name, text in ({"handler.py": HANDLER} | (files or {})).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        if model is not None:
            (tmp_path / "MAR-INF").mkdir(exist_ok=True)
            whole = {"runtime": "python", "model": model} | manifest
            (tmp_path / "MAR-INF/MANIFEST.json").write_text(json.dumps(whole))
        return tmp_path

    return write


def read(directory: Path, default_handler: str = "") -> Archive:
    return Archive.read(directory, "echo.mar", default_handler)


def renamed(archive: Archive, **changes: str) -> Archive:
    return dataclasses.replace(archive, manifest=dataclasses.replace(archive.manifest, **changes))


def test_a_manifest_is_read_whole(write):
    model = MODEL | {
        "serializedFile": "m.pt", "modelFile": "model.py", "requirementsFile": "r.txt",
        "configFile": "c.yaml",
        "extensions": "a.txt,b.txt",
    }  # fmt: skip
    raw = {"runtime": "python3", "model": model, "archiverVersion": "0.12.0"}
    assert read(write(**raw)).manifest == Manifest(
        model_name="echo", version="1.0", handler="handler.py", runtime="python3",
        serialized_file="m.pt", model_file="model.py", requirements_file="r.txt", config_file="c.yaml",
        extensions=("a.txt", "b.txt"), raw=raw,
    )  # fmt: skip


def test_an_older_manifest_is_read(write):
    old = {"modelServerVersion": "1.0", "implementationVersion": "1.0", "specificationVersion": "1.0"}
    manifest = read(write({"modelName": "old", "handler": "service:handle"}, **old)).manifest
    assert (manifest.model_name, manifest.version, manifest.handler) == ("old", "1.0", "service:handle")


def test_a_number_for_a_version_is_its_text(write):
    assert read(write(MODEL | {"modelVersion": 2.1})).manifest.version == "2.1"


def test_without_a_manifest_the_archive_names_the_model(write):
    directory = write(None)
    assert Archive.read(directory, "digits.tar.gz", "image_classifier").manifest == Manifest(
        model_name="digits", version="1.0", handler="image_classifier"
    )
    write(None, {"model-config.yaml": "batchSize: 4"})
    assert read(directory).config.batch_size == 4


@pytest.mark.parametrize(
    "name", ["digits", "digits.mar", "digits.MAR", "digits.zip", "digits.tar.gz", "digits.tgz"]
)
def test_the_stem_of_an_archive(name):
    assert archive_stem(name) == "digits"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model": 3}', '{"model": {"handler": ["a"]}}', "[" * 100_000, "\xff"]
)
def test_a_manifest_that_is_none_is_refused(write, text):
    directory = write()
    (directory / "MAR-INF/MANIFEST.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidArchive, match=r"^echo.mar: MAR-INF/MANIFEST.json.* rebuild the archive"):
        read(directory)


def test_a_configuration_is_read_once(write, caplog):
    directory = write(MODEL | {"configFile": "c.yaml"}, {"c.yaml": "batchSize: many\nmaxWorkers: 2"})
    archive = read(directory)
    assert archive.config.max_workers == 2
    (directory / "c.yaml").write_text("maxWorkers: 3")
    assert check_model(archive).max_workers == 2
    assert len(caplog.messages) == 1, "the warning of the invalid batchSize"


def refused(directory: Path, *words: str, **changes) -> None:
    with pytest.raises(InvalidArchive) as error:
        check_model(renamed(read(directory), **changes))
    assert str(error.value).startswith("echo.mar: ")
    for word in words:
        assert word in str(error.value)


def test_a_good_model_passes(write):
    config = "batchSize: 8\nsamples: [one.json, sub/two.json]\n"
    model = MODEL | {"serializedFile": "m.pt", "modelFile": "model.py", "configFile": "c.yaml"}
    files = {
        "m.pt": "",
        "model.py": "class Model: ...",
        "c.yaml": config,
        "one.json": "1",
        "sub/two.json": "2",
    }
    directory = write(model, files)
    assert check_model(read(directory)).samples == ("one.json", "sub/two.json")


@pytest.mark.parametrize("key", ["serializedFile", "modelFile", "requirementsFile", "configFile"])
@pytest.mark.parametrize("name", ["absent.bin", "../echo.mar", "/etc/passwd", "a\0b", "n" * 5000])
def test_a_file_that_is_named_must_be_there(write, key, name):
    refused(write(MODEL | {key: name}), repr(name), "not in the archive")


def test_a_link_out_is_not_there(write):
    directory = write(MODEL | {"serializedFile": "m.pt"})
    (directory / "m.pt").symlink_to("/etc/passwd")
    refused(directory, "'m.pt'", "not in the archive")


def test_a_sample_must_be_there(write):
    refused(write(MODEL | {"configFile": "c.yaml"}, {"c.yaml": "samples: [absent.json]"}), "'absent.json'")


@pytest.mark.parametrize(
    "handler", ["handler.py", "handler", "handler:handle", "handler.py:handle", "lib/handler.py"]
)
def test_a_handler_file_however_it_is_named(write, handler):
    directory = write(MODEL | {"handler": handler})
    assert read(directory).handler_file == directory / "handler.py"
    check_model(read(directory))


def test_a_handler_file_in_a_folder(write):
    directory = write(MODEL | {"handler": "lib/handler.py"}, {"lib/handler.py": "def handle(:"})
    assert read(directory).handler_file == directory / "lib/handler.py"
    refused(directory, "line 1")


def test_a_built_in_handler(write):
    directory = write(MODEL | {"handler": "image_classifier"})
    assert read(directory).handler_file is None
    check_model(read(directory))
    refused(directory, "'image_clasifier'", "did you mean 'image_classifier'", handler="image_clasifier")
    refused(directory, "'xyz.py'", "base_handler", handler="xyz.py")
    refused(directory, "names no handler", "default_service_handler", handler="")


FOLDER = {
    "config.json": '{"architectures": ["BertForTokenClassification"]}',
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
}


def test_a_model_folder_is_a_model(write):
    directory = write(None, FOLDER)
    archive = Archive.read(directory, "entities", "base_handler")
    manifest = archive.manifest
    assert (manifest.model_name, manifest.version, manifest.handler) == ("entities", "1.0", "huggingface")
    config = check_model(archive)
    assert (config.task, config.raw) == ("token-classification", {"task": "token-classification"})
    assert check_model(archive, "feature-extraction").task == "feature-extraction", "the caller goes first"
    (directory / "model-config.yaml").write_text("batchSize: 8\ntask: feature-extraction\n")
    archive = Archive.read(directory, "entities")
    config = check_model(archive)
    assert (config.batch_size, config.task, config.raw["batchSize"]) == (8, "feature-extraction", 8)
    assert check_model(archive, "ner").task == "token-classification", "and before the file"


def test_a_manifest_in_a_model_folder_says_its_version(write):
    directory = write({"modelName": "entities", "modelVersion": "2.0", "handler": "huggingface"}, FOLDER)
    archive = read(directory)
    assert (archive.manifest.version, check_model(archive).task) == ("2.0", "token-classification")


@pytest.mark.parametrize(
    "changes, task, words",
    [
        ({}, "poetry", "the task 'poetry' is not supported; there are automatic-speech-recognition,"),
        ({}, "token-clasification", "did you mean 'token-classification'?"),
        (
            {},
            "summarization",
            "BertForTokenClassification is for token-classification, not for summarization",
        ),
        ({"model.safetensors": None}, None, "no weights; put model.safetensors beside it"),
        ({"tokenizer.json": None}, None, "there is no tokenizer.json"),
        ({"config.json": "{"}, None, "its config.json is not JSON"),
        ({"config.json": "[]"}, None, "its config.json is no JSON object"),
        ({"config.json": None}, None, "a Hugging Face folder has a config.json"),
        ({"model.safetensors": None, "pytorch_model.bin": ""}, None, "its weights are pickles"),
        ({"config.json": '{"architectures": ["Own"]}'}, None, "(Own) determines no task; set one with task="),
    ],
)
def test_a_folder_that_is_no_model_is_refused(write, changes, task, words):
    directory = write(None, {name: text for name, text in {**FOLDER, **changes}.items() if text is not None})
    with pytest.raises(InvalidArchive) as error:
        check_model(Archive.read(directory, "entities"), task)
    assert str(error.value).startswith("entities: ") and words in str(error.value)


def test_pickles_in_a_folder_that_is_trusted(write):
    files = {**FOLDER, "pytorch_model.bin": "", "model-config.yaml": "trusted: true\n"}
    directory = write(None, {name: text for name, text in files.items() if name != "model.safetensors"})
    archive = Archive.read(directory, "entities")
    config = check_model(archive, trusted=True)
    assert config.task == "token-classification" and config.raw["trusted"] is True
    with pytest.raises(InvalidArchive, match=r"its weights are pickles.*trusted=true"):
        check_model(archive)


def test_trust_of_a_models_own_file_does_not_count(write, caplog):
    directory = write(None, {**FOLDER, "model-config.yaml": "trusted: true\n"})
    config = check_model(Archive.read(directory, "entities"))
    assert config.trusted is None and "trusted" not in config.raw
    assert "trusted is ignored" in caplog.text


@pytest.mark.parametrize("handler", ["huggingface", "llm", "llm.py", "causal_lm:handle"])
def test_a_folders_file_does_not_replace_a_built_in_handler(write, handler):
    """A folder without a manifest runs no code of its own, so the file need not even compile."""
    module = handler.partition(":")[0].removesuffix(".py")
    directory = write(None, {**FOLDER, f"{module}.py": "def ("})
    archive = renamed(Archive.read(directory, "entities"), handler=handler)
    check_model(archive)
    with pytest.raises(InvalidArchive, match=f"{module}.py, line 1"):
        check_model(archive, trusted=True)


def test_a_folders_own_handler_needs_trust(write):
    directory = write(None, {**FOLDER, "own.py": HANDLER, "package/__init__.py": ""})
    archive = Archive.read(directory, "entities")
    for handler in ("own.py", "own:handle"):
        named = renamed(archive, handler=handler)
        with pytest.raises(
            InvalidArchive, match=r"own.py is code of a model without a manifest.*trusted=true"
        ):
            check_model(named)
        check_model(named, trusted=True)
    with pytest.raises(InvalidArchive, match="neither a file of the archive nor built in"):
        check_model(renamed(archive, handler="package.serving:Handler"))


def weights(directory, held="GLOBAL", name="model.pt"):
    """Write the part of torch.save's output that is inspected: a pickle that names ``held``."""
    with zipfile.ZipFile(directory / name, "w") as file:
        file.writestr("model/data.pkl", b"\x80\x02c" + held.encode() + b"\n.")


BUILT_IN = MODEL | {"handler": "base_handler", "serializedFile": "model.pt", "modelFile": "model.py"}


def test_a_pickle_that_is_not_trusted_is_refused_before_anything_starts(write):
    directory = write(BUILT_IN, {"model.py": ""})
    weights(directory, "model\nNet")
    refused(
        directory, "model.pt: it holds more than tensors", "model.Net", "register the model with trusted=true"
    )
    weights(directory, "torch._utils\n_rebuild_tensor_v2")
    check_model(read(directory))


def test_a_pickle_is_left_to_who_trusts_or_loads_it(write):
    files = {"model.py": ""}
    for model, more, trusted in (
        (BUILT_IN, {}, True),
        (BUILT_IN | {"handler": "handler.py"}, {}, False),
        (BUILT_IN, {"model.py": "import torch\ntorch.serialization.add_safe_globals([dict])"}, False),
    ):
        directory = write(model, {**files, **more})
        weights(directory, "model\nNet")
        check_model(read(directory), trusted=trusted)


def test_weights_that_a_built_in_handler_never_loads(write):
    directory = write({key: value for key, value in BUILT_IN.items() if key != "modelFile"})
    weights(directory, "torch._utils\n_rebuild_tensor_v2")
    refused(directory, "model.pt: this is no TorchScript model", "--model-file model.py")
    weights(directory, name="model.pt2")
    directory = write(MODEL | {"handler": "base_handler", "serializedFile": "model.pt2"})
    refused(directory, "model.pt2: a .pt2 file", "register the model with trusted=true")


def test_a_registrations_task_reaches_a_handler_of_the_archives_own(write):
    directory = write()
    assert check_model(read(directory), "translation").raw == {"task": "translation"}


def test_a_module_is_left_to_the_models_own_process(write):
    directory = write(
        MODEL | {"handler": "lib.serving:Handler"}, {"lib/serving/__init__.py": "raise Exception"}
    )
    check_model(read(directory))
    check_model(renamed(read(directory), handler="json.decoder:JSONDecoder"))
    refused(directory, "'nowhere.serving:Handler'", handler="nowhere.serving:Handler")


@pytest.mark.parametrize(
    "text, words",
    [
        ("import os\ndef handle(:\n", "handler.py, line 2"),
        ("return 1\n", "line 1"),
        ("x = '\0'\n", "handler.py"),
    ],
)
def test_a_handler_that_does_not_compile(write, text, words):
    refused(write(files={"handler.py": text}), words, "mend the file")


def test_a_model_file_that_does_not_compile(write):
    refused(write(MODEL | {"modelFile": "model.py"}, {"model.py": "\n\nclass"}), "model.py, line 3")


def test_a_warning_about_an_authors_code_is_none_of_ours(write):
    directory = write(files={"handler.py": HANDLER + "x = '\\d' is 3\n"})
    check_model(read(directory))


@pytest.mark.parametrize("name", ["a/b", "a b", "é", "", ".", "..", "-a", ".hidden", "a\n", "a?b", "a%2fb"])
def test_a_name_that_is_no_part_of_a_route(write, name):
    refused(write(), f"model name {name!r}", "letters, digits", model_name=name)
    refused(write(), f"version {name!r}", "letters, digits", version=name)


def test_another_runtime_is_refused(write):
    refused(write(runtime="LSP"), "'LSP'", "--runtime python")


@pytest.mark.parametrize("form, file", [
    ("default", "echo.mar"), ("zip-store", "echo.mar"), ("tgz", "echo.tar.gz"), ("no-archive", "echo"),
])  # fmt: skip
def test_what_the_real_archiver_makes(tmp_path, form, file):
    inputs = {
        "service.py": HANDLER,
        "net.py": "class Net: ...",
        "c.yaml": "batchSize: 2",
        "w.pt": "",
        "x": "",
        "r.txt": "",
    }
    for name, text in inputs.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "out").mkdir()
    (tmp_path / "tmp").mkdir()
    subprocess.run(
        [Path(sys.executable).with_name("torch-model-archiver"), "--model-name", "echo", "-v", "2.0",
         "--handler", "service.py", "--model-file", "net.py", "--serialized-file", "w.pt", "--extra-files",
         "x",
         "-r", "r.txt", "-c", "c.yaml",
         "--export-path", "out", "--archive-format", form],
        check=True, cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")},
    )  # fmt: skip
    made = tmp_path / "out" / file
    directory = made if made.is_dir() else unpack(made, tmp_path / "into", ModelStoreSettings())
    archive = Archive.read(directory, file)
    manifest = archive.manifest
    assert (manifest.model_name, manifest.version, manifest.handler) == ("echo", "2.0", "service.py")
    assert (manifest.serialized_file, manifest.model_file) == ("w.pt", "net.py")
    assert check_model(archive).batch_size == 2
    assert sorted(p.name for p in directory.iterdir()) == sorted([*inputs, "MAR-INF"])


def test_an_async_handler_gives_no_warning():
    config = ModelConfig.parse("asyncCommunication: true\nparallelType: tp")
    assert config.async_communication is True
    assert config.unserved == ["parallelType"]


LLAMA = {"config.json": '{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}'}


@pytest.mark.parametrize("handler", ["causal_lm", "llm"])
@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            "tensor_parallel: 3",
            "config.json: tensor_parallel: 3 does not divide 4 attention heads and 2 key-value",
        ),
        ("pipeline_parallel: 4", "pipeline_parallel: 4 is more than the model's 3 layers"),
        ("parallelType: tp\nparallelLevel: 4", "tensor_parallel: 4 does not divide"),
        ("device_map: auto\ntensor_parallel: 2", "device_map lays the model out .* Take one of the two away"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(write, handler, result, words):
    model = MODEL | {"handler": handler, "configFile": "c.yaml"}
    folder = write(model, LLAMA | {"c.yaml": result})
    with pytest.raises(ConfigurationError, match=words):
        check_model(read(folder))


def test_a_cut_of_torchserves(write):
    """``parallelType`` is understood where a built-in handler is cut up, and unserved where the archive's
    own is.
    """

    def read_with(result, handler="llm", **files):
        folder = write(
            MODEL | {"handler": handler, "configFile": "c.yaml"}, LLAMA | {"c.yaml": result} | files
        )
        config = check_model(read(folder))
        return config.tensor_parallel, config.pipeline_parallel, config.unserved

    assert read_with("parallelType: tp\nparallelLevel: 2") == (2, None, [])
    assert read_with("parallelType: pp\ntorchrun: {nproc-per-node: 3}") == (None, 3, [])
    assert read_with("parallelType: tp\nparallelLevel: 2\ntensor_parallel: 1") == (1, None, ["parallelType"])
    assert read_with("parallelType: pptp\nparallelLevel: 2") == (None, None, ["parallelType"])
    assert read_with("parallelType: tp\nparallelLevel: 2", "handler.py") == (None, None, ["parallelType"])
    assert read_with("parallelType: tp\nparallelLevel: 2", **{"llm.py": HANDLER}) == (
        None,
        None,
        ["parallelType"],
    )


def write_scripts(directory: Path, *files: str) -> Path:
    for name in files:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}" if name.endswith(".json") else "")
    return directory


def test_a_folder_with_a_script_has_sagemaker_s_handler_where_it_is_the_default(tmp_path: Path) -> None:
    files = "code/inference.py", "code/requirements.txt", "config.json", "model.safetensors"
    folder = write_scripts(tmp_path / "scripted", *files)
    manifest = read(folder, "sagemaker").manifest
    assert (manifest.handler, manifest.requirements_file) == ("sagemaker", "code/requirements.txt")
    assert read(folder).manifest.handler == "huggingface"
    bare = write_scripts(tmp_path / "bare", "config.json", "model.safetensors")
    assert read(bare, "sagemaker").manifest.handler == "huggingface"
    assert read(bare, "sagemaker").manifest.requirements_file is None
