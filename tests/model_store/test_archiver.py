"""Archives that we make, beside those of torch-model-archiver."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from serve_app.model_store.archive import MANIFEST, Archive
from serve_app.model_store.archiver import ArchiveRecipe, ArchiverError, make, write_zip
from serve_app.model_store.cache import unpack
from serve_app.model_store.model_check import check_model
from serve_app.settings import ModelStoreSettings
from tests.support.disk_calls import DiskCalls

HANDLER = "def handle(data, context):\n    return data\n"


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an author's folder with everything that an archive may hold, as the working directory."""
    here = tmp_path / "author"
    files = {
        "code/handler.py": HANDLER,
        "code/model.py": "class Model:\n    pass\n",
        "weights.pt": "weights " * 1000,
        "labels.json": '{"0": "cat"}',
        "requirements.txt": "numpy\n",
        "model-config.yaml": "batchSize: 4\n",
        "more/a.txt": "a",
        "more/deep/er/b.txt": "b",
        "more/.hidden/c.txt": "c",
        "more/__pycache__/d.pyc": "d",
        "more/.dotfile": "e",
        "x1.txt": "1",
        "x2.txt": "2",
    }
    for name, text in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(here)
    return here


def recipe(out: Path, **more) -> ArchiveRecipe:
    result = {"model_name": "digits", "version": "1.0", "handler": "code/handler.py", "export_path": str(out)}
    return ArchiveRecipe(**{**result, **more})


FULL = {
    "serialized_file": "weights.pt",
    "model_file": "code/model.py",
    "extra_files": "labels.json,more, x*.txt",
    "requirements_file": "requirements.txt",
    "config_file": "model-config.yaml",
}


def read(archive: Path) -> dict[str, bytes]:
    """Every file of an archive of any format by its name."""
    if archive.is_dir():
        return {str(p.relative_to(archive)): p.read_bytes() for p in archive.rglob("*") if p.is_file()}
    if archive.suffix == ".gz":
        with tarfile.open(archive) as tar:
            return {m.name: tar.extractfile(m).read() for m in tar.getmembers() if m.isfile()}  # type: ignore[union-attr]
    with zipfile.ZipFile(archive) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def theirs(out: Path, recipe: ArchiveRecipe) -> Path:
    """Write the same archive with torch-model-archiver."""
    words = [sys.executable, "-m", "model_archiver.model_packaging"]
    for field in ("model_name", "version", "handler", "runtime", "archive_format", *FULL):
        if value := getattr(recipe, field):
            words += [f"--{field.replace('_', '-')}", value]
    done = subprocess.run([*words, "--export-path", str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return next(out.iterdir())


class TestBesideTorchModelArchiver:
    @pytest.mark.parametrize("format_", ["default", "zip-store", "tgz", "no-archive"])
    def test_the_same_archive(self, author: Path, tmp_path: Path, format_) -> None:
        requested = recipe(tmp_path / "out", archive_format=format_, **FULL)
        ours = make(requested)
        assert ours.warnings == ()
        (tmp_path / "theirs").mkdir()
        other = theirs(tmp_path / "theirs", requested)
        assert ours.path.name == other.name
        ours_files, their_files = read(ours.path), read(other)
        [manifest] = [name for name in ours_files if name.endswith(MANIFEST)]
        made, wanted = (json.loads(files.pop(manifest)) for files in (ours_files, their_files))
        assert ours_files == their_files
        assert len(ours_files) == len(ours.files)
        assert made.pop("createdOn")[:10] == wanted.pop("createdOn")[:10]
        assert json.dumps(made) == json.dumps(wanted)  # the order of the keys too

    @pytest.mark.parametrize("handler", ["image_classifier", "code/handler"])
    def test_the_same_manifest(self, author: Path, tmp_path: Path, handler: str) -> None:
        requested = recipe(tmp_path / "out", handler=handler, runtime="python3")
        (tmp_path / "theirs").mkdir()
        made, wanted = (read(path) for path in (make(requested).path, theirs(tmp_path / "theirs", requested)))
        assert set(made) == set(wanted)
        assert json.loads(made[MANIFEST])["model"] == json.loads(wanted[MANIFEST])["model"]

    @pytest.mark.parametrize(
        ("format_", "packing"), [("default", zipfile.ZIP_DEFLATED), ("zip-store", zipfile.ZIP_STORED)]
    )
    def test_is_packed_as_theirs(self, author: Path, tmp_path: Path, format_, packing: int) -> None:
        with zipfile.ZipFile(make(recipe(tmp_path / "out", archive_format=format_)).path) as archive:
            assert archive.getinfo("handler.py").compress_type == packing


@pytest.mark.parametrize("format_", ["default", "tgz"])
def test_a_function_of_a_file_is_a_handler_and_the_store_takes_it(
    author: Path, tmp_path: Path, format_
) -> None:
    made = make(recipe(tmp_path / "out", handler="code/handler.py:handle", archive_format=format_, **FULL))
    directory = unpack(made.path, tmp_path / "model", ModelStoreSettings())
    archive = Archive.read(directory, made.path.name)
    assert archive.manifest.handler == "handler.py:handle"
    assert check_model(archive).batch_size == 4


def test_an_archive_is_written_over_only_by_force(author: Path, tmp_path: Path) -> None:
    first = make(recipe(tmp_path / "out"))
    with pytest.raises(ArchiverError, match=rf"^{first.path} already exists\.\nPlease specify --force/-f"):
        make(recipe(tmp_path / "out", version="2.0"))
    again = make(recipe(tmp_path / "out", version="2.0", force=True))
    assert again.warnings == (f"Overwriting {first.path} ...",)
    assert json.loads(read(again.path)[MANIFEST])["model"]["modelVersion"] == "2.0"


def test_two_files_with_one_name_are_reported(author: Path, tmp_path: Path) -> None:
    (author / "other").mkdir()
    (author / "other/labels.json").write_text("other")
    made = make(recipe(tmp_path / "out", extra_files="labels.json,other"))
    assert read(made.path)["labels.json"] == b"other"
    assert made.warnings == ("Two files are named labels.json: other/labels.json replaces labels.json",)


def test_a_pattern_without_a_match_is_reported(author: Path, tmp_path: Path) -> None:
    made = make(recipe(tmp_path / "out", extra_files="*.nothing"))
    assert made.warnings == ("Given wildcard pattern did not match any file: *.nothing",)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model_name": "di gits"}, "Model name contains special characters."),
        ({"export_path": "nowhere"}, "Given export-path nowhere is not a directory."),
        (
            {"serialized_file": "wieghts.pt"},
            "--serialized-file wieghts.pt does not exist; did you mean weights.pt?",
        ),
        ({"model_file": "code"}, "--model-file code is a directory"),
        ({"extra_files": "no/such.txt"}, "--extra-files no/such.txt does not exist: there is no folder no"),
        ({"handler": "image_clasifier"}, "did you mean the built-in image_classifier?"),
        ({"handler": "code/handlr.py"}, "did you mean code/handler.py?"),
        ({"handler": "broken.py"}, "--handler broken.py, line 1: "),
        (
            {"config_file": "broken.yaml"},
            "broken.yaml: torchrelay: unknown key 'batchsize'; did you mean 'batchSize'?",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    author: Path, tmp_path: Path, more: dict, words: str
) -> None:
    (author / "broken.py").write_text("def handle(:\n")
    (author / "broken.yaml").write_text("torchrelay: {batchsize: 3}\n")
    with pytest.raises(ArchiverError) as refused:
        make(recipe(tmp_path / "out", **more))
    assert words in str(refused.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_archive_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = DiskCalls.record(monkeypatch)
    write_zip(tmp_path / "m.mar", {}, {"a": "b"})
    [rename] = [i for i, call in enumerate(calls) if call.kind == "rename"]
    assert (tmp_path / "m.mar").stat().st_ino in {call.inode for call in calls[:rename]}
