"""The cache: one complete copy of each archive, also with concurrent readers and killed processes."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from serve_app.errors import ArchiveNotFound, DownloadFailed, InvalidArchive
from serve_app.model_store.atomic_dir import STALE_AFTER, remove_stale
from serve_app.model_store.cache import ArchiveCache
from serve_app.settings import MIB, ModelStoreSettings
from tests.support.disk_calls import DiskCalls
from tests.support.http_server import serving_folder

pytestmark = pytest.mark.integration


SETTINGS = ModelStoreSettings()
NOBODY = (1 << 22) + 1  # a process id above Linux's highest


def make(path: Path, files: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (files or {"handler.py": b"x = 1\n", "sub/w.pt": bytes(5 * MIB)}).items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def archive(tmp_path):
    return make(tmp_path / "m.mar")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def below(root: Path) -> list[str]:
    """Return the cache's entries, finished and partial, two levels deep."""
    kinds = ("archives", "models", "partial")
    return sorted(f"{kind}/{path.name}" for kind in kinds for path in (root / kind).iterdir())


def test_an_archive_is_kept_once_and_opened_by_its_digest(root, archive):
    cache = ArchiveCache(root, SETTINGS)
    seen = []
    stored = cache.store(archive, "m.mar", progress=lambda *at: seen.append(at))
    assert seen[-1] == (archive.stat().st_size, archive.stat().st_size)
    assert stored.directory == root / "models" / stored.digest
    assert (stored.directory / "handler.py").read_bytes() == b"x = 1\n"
    assert stored.uri == (root / "archives" / stored.digest / "m.mar").as_uri()
    assert (root / "archives" / stored.digest / "m.mar").read_bytes() == archive.read_bytes()
    again = cache.store(archive, "other.mar")
    assert again == stored
    assert below(root) == [f"archives/{stored.digest}", f"models/{stored.digest}"]
    archive.unlink()
    assert cache.open(stored.uri, stored.digest) == stored.directory


def test_another_node_brings_it_from_the_uri(root, archive, tmp_path):
    stored = ArchiveCache(root, SETTINGS).store(archive, "m.mar")
    elsewhere = ArchiveCache(tmp_path / "elsewhere", SETTINGS)
    directory = elsewhere.open(stored.uri, stored.digest)
    assert directory == tmp_path / "elsewhere" / "models" / stored.digest
    assert (directory / "handler.py").read_bytes() == b"x = 1\n"
    assert below(tmp_path / "elsewhere") == [f"models/{stored.digest}"]


def test_another_node_brings_it_over_http(root, archive, tmp_path):
    stored = ArchiveCache(root, SETTINGS).store(archive, "m.mar")
    with serving_folder(root / "archives") as address:
        elsewhere = ArchiveCache(tmp_path / "elsewhere", SETTINGS)
        with pytest.raises(DownloadFailed):
            elsewhere.open(f"{address}/absent.mar", stored.digest)
        directory = elsewhere.open(f"{address}/{stored.digest}/m.mar", stored.digest)
    assert (directory / "handler.py").read_bytes() == b"x = 1\n"


def test_a_uri_with_other_bytes_is_refused(root, archive, tmp_path):
    cache = ArchiveCache(root, SETTINGS)
    digest = "0" * 64
    with pytest.raises(InvalidArchive, match=f"its sha256 is [0-9a-f]{{64}} and should be {digest}"):
        cache.open(archive.as_uri(), digest)
    for uri in ((tmp_path / "absent.mar").as_uri(), tmp_path.as_uri()):
        with pytest.raises(ArchiveNotFound, match=uri):
            cache.open(uri, digest)
    with pytest.raises(InvalidArchive, match="not a sha256"):
        cache.open(archive.as_uri(), "../../outside")
    assert below(root) == []


def test_a_bad_archive_is_not_kept(root, tmp_path):
    cache = ArchiveCache(root, ModelStoreSettings(max_archive_bytes=1000))
    (tmp_path / "bad.mar").write_bytes(b"PK\x03\x04 and nothing more")
    with pytest.raises(InvalidArchive, match=r"bad.mar"):
        cache.store(tmp_path / "bad.mar", "bad.mar")
    (tmp_path / "large.mar").write_bytes(bytes(1001))
    with pytest.raises(InvalidArchive, match=r"large.mar.*max_archive_bytes"):
        cache.store(tmp_path / "large.mar", "large.mar")
    assert below(root) == []


def test_a_top_directory_becomes_the_models(root, tmp_path):
    (tmp_path / "handler.py").write_text("x = 1\n")
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "handler.py", "m/handler.py")
    stored = ArchiveCache(root, SETTINGS).store(tmp_path / "m.tar.gz", "m.tar.gz")
    assert [p.name for p in stored.directory.iterdir()] == ["handler.py"]
    assert below(root) == [f"archives/{stored.digest}", f"models/{stored.digest}"]


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        (["code/inference.py"], ["code"]),  # the only folder of a model with a script alone
        (["code/MAR-INF/MANIFEST.json", "code/h.py"], ["MAR-INF", "h.py"]),  # an archive of that name
        (["code/config.json"], ["config.json"]),
    ],
)
def test_a_folder_of_scripts_is_a_part_of_the_model(root, tmp_path, files, kept):
    source = tmp_path / "m"
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    stored = ArchiveCache(root, SETTINGS).store(source, "m")
    assert sorted(path.name for path in stored.directory.iterdir()) == kept


def test_a_directory_is_kept_as_it_was(root, tmp_path):
    source = tmp_path / "m"
    source.mkdir()
    (source / "handler.py").write_text("old")
    cache = ArchiveCache(root, SETTINGS)
    old = cache.store(source, "m")
    (source / "handler.py").write_text("new")
    new = cache.store(source, "m")
    assert old.digest != new.digest
    assert (old.directory / "handler.py").read_text() == "old"
    elsewhere = ArchiveCache(tmp_path / "elsewhere", SETTINGS).open(old.uri, old.digest)
    assert (elsewhere / "handler.py").read_text() == "old"
    (source / "handler.py").write_text("old")
    assert cache.store(source, "m") == old


def test_what_is_removed_is_gone_and_can_come_back(root, archive):
    cache = ArchiveCache(root, SETTINGS)
    stored = cache.store(archive, "m.mar")
    cache.remove(stored.digest)
    cache.remove(stored.digest)
    assert below(root) == []
    assert cache.store(archive, "m.mar") == stored


def _store(root: Path, archive: Path, start, results) -> None:
    cache = ArchiveCache(root, SETTINGS)
    start.wait()
    results.put(cache.store(archive, archive.name).directory)


def _open(root: Path, archive: Path, digest: str, start, results) -> None:
    cache = ArchiveCache(root, SETTINGS)
    start.wait()
    results.put(cache.open(archive.as_uri(), digest))


@pytest.mark.parametrize("work", [_store, _open])
def test_two_processes_at_once(root, archive, tmp_path, work):
    stored = ArchiveCache(tmp_path / "first", SETTINGS).store(archive, "m.mar")
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(2), spawn.Queue()
    requested = (stored.digest,) if work is _open else ()
    workers = [spawn.Process(target=work, args=(root, archive, *requested, start, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        directories = {results.get(timeout=200) for _ in workers}
    finally:
        for worker in workers:
            worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert directories == {root / "models" / stored.digest}
    assert (root / "models" / stored.digest / "sub/w.pt").stat().st_size == 5 * MIB
    assert not [name for name in below(root) if name.startswith("partial")]


def test_who_loses_the_race_uses_what_the_winner_put_there(root, archive):
    """The second store begins and ends while the first is in mid-copy."""
    slow, quick = ArchiveCache(root, SETTINGS), ArchiveCache(root, SETTINGS)
    won = []

    def win(*_):
        if not won:
            won.append(quick.store(archive, "quick.mar"))
            (won[0].directory / "mark").touch()

    assert slow.store(archive, "slow.mar", progress=win) == won[0]
    assert (won[0].directory / "mark").exists()
    assert len(below(root)) == 2


KILLED = """
import sys
from pathlib import Path
from serve_app.settings import ModelStoreSettings
from serve_app.model_store.cache import ArchiveCache

cache = ArchiveCache(Path(sys.argv[1]), ModelStoreSettings())
cache.{call}, progress=lambda done, total: print(done, flush=True))
"""


@pytest.mark.parametrize(
    "call", ["store(Path(sys.argv[2]), 'm.mar'", "open('file://' + sys.argv[2], sys.argv[3]"]
)
def test_a_process_killed_in_mid_copy_leaves_nothing_that_counts(root, archive, tmp_path, call):
    stored = ArchiveCache(tmp_path / "first", SETTINGS).store(archive, "m.mar")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # a source that gives a MiB and then no more
    command = [sys.executable, "-c", KILLED.format(call=call), str(root), str(pipe), stored.digest]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, pipe.open("wb") as source:
        try:
            source.write(b"PK\x03\x04" + bytes(MIB - 4))
            source.flush()
            assert process.stdout.readline() == f"{MIB}\n"
            assert [name.partition("/")[0] for name in below(root)] == ["partial"]
            ArchiveCache(root, SETTINGS)  # what a living process is at is left alone
            assert len(below(root)) == 1
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    cache = ArchiveCache(root, SETTINGS)
    assert below(root) == []
    assert (cache.open(archive.as_uri(), stored.digest) / "handler.py").exists()
    assert cache.store(archive, "m.mar").digest == stored.digest


def test_a_process_killed_in_mid_unpacking_leaves_nothing_that_counts(root, archive):
    limited = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
    limited += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({MIB}, {MIB}))\n"
    limited += "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    script = limited + KILLED.format(call="store(Path(sys.argv[2]), 'm.mar'")
    ended = subprocess.run([sys.executable, "-c", script, str(root), str(archive)], stdout=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGXFSZ  # the kernel's, at the first MiB of w.pt
    (left,) = (root / "partial").iterdir()
    assert (left / "model" / "sub" / "w.pt").stat().st_size == MIB
    stored = ArchiveCache(root, SETTINGS).store(archive, "m.mar")
    assert below(root) == [f"archives/{stored.digest}", f"models/{stored.digest}"]
    assert (stored.directory / "sub/w.pt").stat().st_size == 5 * MIB


def test_work_of_other_hosts_is_swept_after_an_hour_without_a_write(root):
    ArchiveCache(root, SETTINGS)
    old, new = (root / "partial" / f"elsewhere.example-{NOBODY}-{name}" for name in ("old", "new"))
    alive = root / "partial" / f"{socket.gethostname()}-{os.getpid()}-alive"
    for place in (old, new, alive):
        (place / "sub").mkdir(parents=True)
        (place / "sub" / "file").touch()
        for path in (place / "sub" / "file", place / "sub", place):
            then = time.time() - (STALE_AFTER + 60 if place is old or path == place else STALE_AFTER - 60)
            os.utime(path, (then, then))
    remove_stale(root / "partial")
    assert sorted(p.name for p in (root / "partial").iterdir()) == sorted([new.name, alive.name])


def test_a_stored_archive_and_its_model_survive_a_power_failure(root, archive, tmp_path, monkeypatch):
    """The directory of a digest is trusted, so that a file which is empty after a crash would stay empty."""
    calls = DiskCalls.record(monkeypatch)
    stored = ArchiveCache(root, SETTINGS).store(archive, "m.mar")
    calls.check_durable(root / "models" / stored.digest)
    calls.check_durable(root / "archives" / stored.digest)
    elsewhere = tmp_path / "elsewhere"
    calls.check_durable(ArchiveCache(elsewhere, SETTINGS).open(stored.uri, stored.digest))
    assert {root.stat().st_ino, elsewhere.stat().st_ino} <= {call.inode for call in calls}


def test_a_model_that_another_process_has_just_moved_is_named_durably(root, archive, monkeypatch):
    cache = ArchiveCache(root, SETTINGS)
    cache.store(archive, "m.mar")
    calls = DiskCalls.record(monkeypatch)
    cache.store(archive, "m.mar")
    assert (root / "models").stat().st_ino in {call.inode for call in calls if call.kind == "sync"}


@pytest.mark.parametrize(
    ("start", "size", "message"),
    [(b"PK\x03\x04", 1 << 40, "larger than max_archive_bytes"), (b"", 1 << 30, "neither")],
)
def test_files_that_are_too_large_or_no_archives_are_not_copied(
    tmp_path: Path, start: bytes, size: int, message: str
) -> None:
    cache = ArchiveCache(tmp_path / "cache", ModelStoreSettings(max_archive_bytes=1 << 30))
    sparse = tmp_path / "sparse.mar"
    with sparse.open("wb") as file:
        file.write(start)
        file.truncate(size)
    copied: list[tuple[int, int | None]] = []
    with pytest.raises(InvalidArchive, match=message):
        cache.store(sparse, "sparse.mar", lambda *at: copied.append(at))
    assert copied == []
