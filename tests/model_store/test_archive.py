"""Archives: what is unpacked, and what is refused without a trace."""

import gzip
import io
import os
import stat
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest

from serve_app.errors import InvalidArchive
from serve_app.model_store.cache import RATIO_FLOOR, pack, unpack
from serve_app.settings import MIB, ModelStoreSettings

SETTINGS = ModelStoreSettings()


def zipped(path: Path, files: dict, compression=zipfile.ZIP_DEFLATED) -> Path:
    """Write a zip of name -> bytes; a ZipInfo may stand for a name."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            if isinstance(name, str):
                name = zipfile.ZipInfo(name)
                name.compress_type = compression
            archive.writestr(name, data)
    return path


def tarred(path: Path, files: dict) -> Path:
    """Write a .tar.gz of name -> bytes; a TarInfo may stand for a name."""
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            entry = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


def zip_link(name: str, mode: int = stat.S_IFLNK) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (mode | 0o777) << 16
    return entry


def contents(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def refused(archive: Path, tmp_path: Path, *words: str, settings: ModelStoreSettings = SETTINGS) -> str:
    """Unpacking fails with these words and the archive's name, and leaves nothing anywhere."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidArchive) as error:
        unpack(archive, tmp_path / "into", settings)
    message = str(error.value)
    assert message.startswith(f"{archive.name}: ")
    for word in words:
        assert word in message
    assert sorted(tmp_path.rglob("*")) == before
    return message


FILES = {
    "MAR-INF/MANIFEST.json": b"{}",
    "handler.py": b"x = 1\n",
    "deep/er/file.bin": bytes(range(256)) * 10,
    "empty": b"",
}


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_a_mar_is_unpacked_whole(tmp_path, compression):
    archive = zipped(tmp_path / "m.mar", FILES, compression)
    directory = unpack(archive, tmp_path / "into", SETTINGS)
    assert directory == tmp_path / "into"
    assert contents(directory) == FILES


@pytest.mark.parametrize("top", ["", "./", "model/", "./model/"])
def test_a_tar_is_unpacked_with_and_without_a_top_directory(tmp_path, top):
    archive = tarred(tmp_path / "m.tar.gz", {top + name: data for name, data in FILES.items()})
    assert contents(unpack(archive, tmp_path / "into", SETTINGS)) == FILES


@pytest.mark.parametrize(
    "only", [{"MAR-INF/MANIFEST.json": b"{}"}, {special("itself", tarfile.SYMTYPE, "."): b""}]
)
def test_what_is_no_top_directory(tmp_path, only):
    assert unpack(tarred(tmp_path / "m.tar.gz", only), tmp_path / "into", SETTINGS) == tmp_path / "into"


def test_the_format_is_in_the_bytes_and_not_in_the_name(tmp_path):
    assert contents(unpack(tarred(tmp_path / "m.mar", FILES), tmp_path / "into", SETTINGS)) == FILES


def test_names_that_differ_in_case_are_two_files(tmp_path):
    files = {"a.txt": b"1", "A.txt": b"2"}
    assert contents(unpack(zipped(tmp_path / "m.mar", files), tmp_path / "into", SETTINGS)) == files


def test_the_last_of_two_entries_of_one_name_counts(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(tmp_path / "m.mar", "w") as archive:
            archive.writestr("a", b"old and long")
            archive.writestr("a", b"new")
    assert contents(unpack(tmp_path / "m.mar", tmp_path / "into", SETTINGS)) == {"a": b"new"}


def test_a_program_stays_executable_and_nothing_stays_setuid(tmp_path):
    entry = tarfile.TarInfo("tool")
    entry.mode = 0o4755
    directory = unpack(
        tarred(tmp_path / "m.tgz", {entry: b"#!/bin/sh\n", "text": b""}), tmp_path / "into", SETTINGS
    )
    assert stat.S_IMODE((directory / "tool").stat().st_mode) == 0o755
    assert not (directory / "text").stat().st_mode & 0o111


@pytest.mark.parametrize("make", [zipped, tarred])
@pytest.mark.parametrize("name", ["../out", "a/../../out", "/tmp/out", "a\\..\\out", "..\\out", ".."])
def test_a_path_that_leaves_is_refused(tmp_path, make, name):
    refused(make(tmp_path / "m.mar", {"fine": b"", name: b"x"}), tmp_path, repr(name), "repack")


def test_a_name_with_a_nul_is_refused(tmp_path):
    archive = zipped(tmp_path / "m.mar", {"aXb": b""})
    archive.write_bytes(archive.read_bytes().replace(b"aXb", b"a\0b"))
    refused(archive, tmp_path, "a\\x00b")


LEAVING = [
    {"up": "../secret"},
    {"up": "/etc/passwd"},
    {"a": "sub/b", "sub/b": "../../secret"},
    {"d1/d2/b": "../..", "a": "d1/d2/b/../../../secret"},  # leaves only once the other link is there
    {"top/up": "../"},  # the top directory becomes the model's
]


@pytest.mark.parametrize("links", LEAVING)
def test_a_link_that_leaves_is_refused(tmp_path, links):
    (tmp_path / "secret").write_text("secret")
    kept = {} if "top/up" in links else {"file": b""}
    tar = tarred(
        tmp_path / "m.tar.gz", {special(n, tarfile.SYMTYPE, t): b"" for n, t in links.items()} | kept
    )
    refused(tar, tmp_path, "link", "leaves")
    mar = zipped(tmp_path / "m.mar", {zip_link(n): t.encode() for n, t in links.items()} | kept)
    refused(mar, tmp_path, "link", "leaves")


def test_nothing_is_written_through_a_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    tar = tarred(tmp_path / "m.tar.gz", {special("a", tarfile.SYMTYPE, str(outside)): b"", "a/file": b"x"})
    refused(tar, tmp_path)
    tar = tarred(
        tmp_path / "m.tar.gz",
        {
            special("a", tarfile.SYMTYPE, str(outside)): b"",
            special("a/l", tarfile.SYMTYPE, "x"): b"",
            "f": b"",
        },
    )
    refused(tar, tmp_path)


def test_a_hard_link_out_or_to_a_link_is_refused(tmp_path):
    (tmp_path / "secret").write_text("secret")
    refused(
        tarred(tmp_path / "1.tgz", {special("a", tarfile.LNKTYPE, "../secret"): b""}), tmp_path, "../secret"
    )
    secret = str(tmp_path / "secret")
    refused(tarred(tmp_path / "2.tgz", {special("a", tarfile.LNKTYPE, secret): b""}), tmp_path, secret)
    chain = {special("a", tarfile.SYMTYPE, secret): b"", special("b", tarfile.LNKTYPE, "a"): b"", "f": b""}
    refused(tarred(tmp_path / "3.tgz", chain), tmp_path, "hard link")
    refused(
        tarred(tmp_path / "4.tgz", {special("a", tarfile.LNKTYPE, "missing"): b"", "f": b""}),
        tmp_path,
        "missing",
    )
    refused(
        tarred(tmp_path / "5.tgz", {special("a", tarfile.LNKTYPE, "d"): b"", "d/f": b""}),
        tmp_path,
        "be created",
    )


def test_link_to_a_name_that_is_too_long_is_refused(tmp_path):
    links = {special("model-config.yaml", tarfile.SYMTYPE, "x" * 300): b"", "f": b"data"}
    refused(tarred(tmp_path / "m.tgz", links), tmp_path, "File name too long")


def test_links_inside_stay(tmp_path):
    links = {
        special("sub/l", tarfile.SYMTYPE, "../f"): b"",
        special("h", tarfile.LNKTYPE, "f"): b"",
        "f": b"data",
    }
    directory = unpack(tarred(tmp_path / "m.tgz", links), tmp_path / "into", SETTINGS)
    assert (directory / "sub/l").is_symlink()
    assert (directory / "sub/l").read_bytes() == (directory / "h").read_bytes() == b"data"


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_a_device_is_refused(tmp_path, kind):
    refused(tarred(tmp_path / "m.tgz", {special("dev", kind): b""}), tmp_path, "'dev'", "neither a file")


def test_a_device_in_a_zip_is_refused(tmp_path):
    refused(
        zipped(tmp_path / "m.mar", {zip_link("dev", stat.S_IFCHR): b""}), tmp_path, "'dev'", "neither a file"
    )


@pytest.mark.parametrize("make", [zipped, tarred])
def test_a_bomb_is_refused_by_its_ratio(tmp_path, make):
    archive = make(tmp_path / "m.mar", {"zeros": bytes(RATIO_FLOOR + MIB)})
    assert archive.stat().st_size < RATIO_FLOOR // 200
    refused(archive, tmp_path, "max_ratio", "bomb")


def test_a_small_archive_may_compress_as_it_likes(tmp_path):
    archive = zipped(tmp_path / "m.mar", {"zeros": bytes(RATIO_FLOOR)})
    assert len(contents(unpack(archive, tmp_path / "into", SETTINGS))["zeros"]) == RATIO_FLOOR


@pytest.mark.parametrize("make", [zipped, tarred])
def test_unpacked_bytes_are_limited(tmp_path, make):
    archive = make(tmp_path / "m.mar", {"a": bytes(600), "b": bytes(600)})
    refused(
        archive, tmp_path, "max_unpacked_bytes (1000)", settings=ModelStoreSettings(max_unpacked_bytes=1000)
    )


def test_the_directory_of_a_zip_is_counted_before_it_is_parsed(tmp_path, monkeypatch):
    """An archive of 50 MB can have a million entries, which zipfile keeps in 600 MB."""
    archive = zipped(tmp_path / "m.mar", {f"f{n}": b"" for n in range(20)})
    settings, parsed = ModelStoreSettings(max_files=5), []
    monkeypatch.setattr(zipfile, "ZipInfo", lambda *args: parsed.append(args))
    refused(archive, tmp_path, "max_files (5)", settings=settings)
    long_names = ModelStoreSettings(max_files=1)
    monkeypatch.undo()
    big = zipped(tmp_path / "n.mar", {"x" * 60_000 + str(n): b"" for n in range(3)})
    refused(big, tmp_path, "max_files (1)", settings=long_names)
    assert not parsed


@pytest.mark.parametrize("make", [zipped, tarred])
def test_files_and_the_directories_they_need_are_counted(tmp_path, make):
    settings = ModelStoreSettings(max_files=5)
    refused(
        make(tmp_path / "m.mar", {f"f{n}": b"" for n in range(6)}),
        tmp_path,
        "max_files (5)",
        settings=settings,
    )
    refused(make(tmp_path / "m.mar", {"a/b/c/d/e/f": b""}), tmp_path, "max_files (5)", settings=settings)
    assert contents(
        unpack(make(tmp_path / "n.mar", {"MAR-INF/b/c": b"", "d": b""}), tmp_path / "into", settings)
    )


def test_a_zip_that_lies_about_lengths_is_refused(tmp_path):
    archive = zipped(tmp_path / "m.mar", {"f": bytes(1 << 20)})
    data = bytearray(archive.read_bytes())
    central = data.index(b"PK\x01\x02")
    for length in (10, 5 << 20):  # fewer than there are, and more
        struct.pack_into("<I", data, central + 24, length)
        archive.write_bytes(data)
        refused(archive, tmp_path, "rebuild")


def test_a_tar_whose_header_asks_for_memory_is_refused(tmp_path):
    header = special("pax", tarfile.XHDTYPE)
    header.size = 64 * MIB
    with gzip.open(tmp_path / "m.tar.gz", "wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT) + bytes(64 * MIB))
    refused(tmp_path / "m.tar.gz", tmp_path, "header of more than")


def test_a_damaged_byte_is_noticed(tmp_path):
    mar = zipped(tmp_path / "m.mar", {"f": os.urandom(5000)}, zipfile.ZIP_STORED)
    tar = tarred(tmp_path / "m.tar.gz", {"f": os.urandom(5000)})
    for archive in (mar, tar):
        data = bytearray(archive.read_bytes())
        data[2500] ^= 1
        archive.write_bytes(data)
        refused(archive, tmp_path, "damaged", "rebuild")


@pytest.mark.parametrize("make", [zipped, tarred])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_archive_is_refused(tmp_path, make, part):
    archive = make(tmp_path / "m.mar", {f"f{n}": os.urandom(5000) for n in range(5)})
    data = archive.read_bytes()
    archive.write_bytes(data[: int(len(data) * part)])
    refused(archive, tmp_path, "rebuild")


def test_a_tar_cut_before_it_was_compressed_is_refused(tmp_path):
    whole = gzip.decompress(tarred(tmp_path / "m.tar.gz", {"a": bytes(600), "b": bytes(600)}).read_bytes())
    for cut in (1536, 1536 + 100, 1536 + 512 + 300):  # at a header, in it, in a file
        (tmp_path / "m.tar.gz").write_bytes(gzip.compress(whole[:cut]))
        refused(tmp_path / "m.tar.gz", tmp_path, "rebuild")


def test_an_encrypted_entry_is_refused(tmp_path):
    archive = zipped(tmp_path / "m.mar", {"f": b"secret"})
    data = bytearray(archive.read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    archive.write_bytes(data)
    refused(archive, tmp_path, "'f'", "encrypted", "without a password")


def test_another_compression_is_refused(tmp_path):
    refused(
        zipped(tmp_path / "m.mar", {"f": b"x"}, zipfile.ZIP_BZIP2), tmp_path, "neither stored nor deflated"
    )


@pytest.mark.parametrize("make", [zipped, tarred])
def test_entries_that_need_one_place_are_refused(tmp_path, make):
    refused(make(tmp_path / "1.mar", {"a": b"", "a/b": b""}), tmp_path, "cannot be created")
    refused(make(tmp_path / "2.mar", {"a/b": b"", "a": b""}), tmp_path, "cannot be created")
    refused(make(tmp_path / "3.mar", {"n" * 300: b""}), tmp_path, "cannot be created")


@pytest.mark.parametrize("data", [b"", b"hello, no archive", b"PK\x05\x06" + bytes(18), b"\x80\x02pickle"])
def test_what_is_no_archive_is_refused(tmp_path, data):
    (tmp_path / "m.mar").write_bytes(data)
    refused(tmp_path / "m.mar", tmp_path, "neither a zip (.mar) nor a .tar.gz", "torchrelay archive")


def test_an_empty_tar_is_refused(tmp_path):
    refused(tarred(tmp_path / "m.tar.gz", {}), tmp_path, "is empty")


def model(directory: Path) -> Path:
    for name, data in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def test_a_directory_packs_to_the_same_bytes_wherever_and_whenever(tmp_path):
    one, two = model(tmp_path / "one"), model(tmp_path / "two")
    os.utime(two / "handler.py", (1, 1))
    (two / "__pycache__").mkdir()
    (two / "__pycache__" / "handler.cpython-311.pyc").write_bytes(b"compiled")
    pack(one, tmp_path / "1.mar", SETTINGS)
    pack(two, tmp_path / "2.mar", SETTINGS)
    assert (tmp_path / "1.mar").read_bytes() == (tmp_path / "2.mar").read_bytes()
    assert contents(unpack(tmp_path / "1.mar", tmp_path / "into", SETTINGS)) == FILES
    (two / "handler.py").write_bytes(b"x = 2\n")
    pack(two, tmp_path / "2.mar", SETTINGS)
    assert (tmp_path / "1.mar").read_bytes() != (tmp_path / "2.mar").read_bytes()


def test_a_packed_directory_keeps_its_inner_links_and_empty_directories(tmp_path):
    source = model(tmp_path / "m")
    (source / "relative").symlink_to("deep/er/file.bin")
    (source / "deep" / "absolute").symlink_to(source / "handler.py")
    (source / "hollow").mkdir()
    pack(source, tmp_path / "m.mar", SETTINGS)
    directory = unpack(tmp_path / "m.mar", tmp_path / "into", SETTINGS)
    assert os.readlink(directory / "deep" / "absolute") == "../handler.py"
    assert (directory / "relative").read_bytes() == FILES["deep/er/file.bin"]
    assert (directory / "hollow").is_dir()


def test_a_directory_that_cannot_be_packed_is_refused(tmp_path):
    archive = tmp_path / "m.mar"

    def fails(what: str, settings: ModelStoreSettings = SETTINGS) -> None:
        with pytest.raises(InvalidArchive, match=what):
            pack(source, archive, settings)
        assert not archive.exists()

    source = model(tmp_path / "m")
    fails("max_files", ModelStoreSettings(max_files=3))
    fails("max_archive_bytes", ModelStoreSettings(max_archive_bytes=100))
    (source / "link").symlink_to(tmp_path)
    fails("leaves")
    (source / "link").unlink()
    os.mkfifo(source / "pipe")
    fails("'pipe' is neither a file nor a directory")
    (source / "pipe").unlink()
    (source / "a\\b").touch()
    fails("backslash")


DEEP = "/".join(["d"] * 65)


@pytest.mark.parametrize("entry", [f"{DEEP}/file", f"{DEEP}/"])
@pytest.mark.parametrize("write", [zipped, tarred])
def test_more_than_64_directory_levels_are_refused(tmp_path: Path, write, entry: str) -> None:
    files: dict = {entry: b""}
    if write is tarred and entry.endswith("/"):
        files = {special(DEEP, tarfile.DIRTYPE): b""}
    refused(write(tmp_path / "m.mar", files), tmp_path, "more than max_depth (64) directory levels")


def test_64_directory_levels_are_unpacked_and_packed(tmp_path: Path) -> None:
    name = f"{DEEP[2:]}/file"
    home = unpack(zipped(tmp_path / "m.mar", {name: b"x", "other": b""}), tmp_path / "into", SETTINGS)
    assert (home / name).read_bytes() == b"x"
    pack(home, tmp_path / "again.mar", SETTINGS)
    inner = home / DEEP[2:] / "one"
    inner.mkdir()
    with pytest.raises(InvalidArchive, match=r"max_depth \(64\)"):
        pack(home, tmp_path / "deeper.mar", SETTINGS)
