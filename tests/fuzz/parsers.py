"""The fuzzed parsers: for each a function of the input's bytes, which fails for anything but a clear refusal.

A refusal is an error of the caller (``serve_app.errors``). Other exceptions, time-outs and violated
invariants are findings.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from handlers.loading import pickle_scan
from serve_app import settings
from serve_app.domain import (
    autoscaling,
    experiment,
    rollout,
    signature,
    tensors,
    traffic_policy,
    workflow_graph,
)
from serve_app.domain.pool import PoolSettings
from serve_app.domain.validation import DocumentError
from serve_app.errors import InvalidArchive
from serve_app.model_store import workflow_archive
from serve_app.model_store.archive import Archive, ModelConfig
from serve_app.model_store.cache import unpack
from serve_app.protocols.http import form_data
from serve_app.protocols.openai import embeddings, ranking
from serve_app.protocols.openinference import binary_codec, conversion, generate
from serve_app.protocols.tei import requests as tei
from serve_app.torchserve_config import parser, translator
from tests.fuzz.documents import ByteReader, build_object, build_value
from tests.fuzz.target import REFUSALS, target

_BOUNDARY = b"multipart/form-data; boundary=b"
_FORM = b'--b\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\nx\r\n--b--\r\n'


@target(
    [b"\x00" + _FORM, b"\x01a=1&b=%20+&a=", b"\x02{}", b"\x03" + _BOUNDARY + b"\n" + _FORM],
    [b"--b", b"\r\n", b"Content-Disposition: form-data; ", b'name="x"', b"filename*=utf-8''x", b"%", b"&"],
)
def forms(data: bytes) -> None:
    """Parse a form; the first byte selects its content type, which may itself be fuzzed."""
    kind, body = data[:1], data[1:]
    if kind == b"\x03":
        header, _, body = body.partition(b"\n")
        content_type = header.decode("latin-1")
    else:
        types = {b"\x00": _BOUNDARY.decode(), b"\x01": form_data.URLENCODED}
        content_type = types.get(kind, "application/json")
    try:
        parts = form_data.parse_body(content_type, body)
    except REFUSALS:
        return
    assert all(isinstance(part.name, str) for part in parts)
    assert sum(len(part.value) for part in parts) <= len(body), "the fields are larger than the body"


_INFER = {
    "id": "1",
    "parameters": {"priority": 1, "timeout": 5, "sequence_id": "a", "binary_data_output": True},
    "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2]}],
    "outputs": [{"name": "y", "parameters": {"classification": 2, "binary_data": False}}],
}
_RAW = {"inputs": [{"name": "x", "shape": [2], "datatype": "UINT8", "parameters": {"binary_data_size": 2}}]}
_TENSOR_WORDS = (
    *("id", "parameters", "inputs", "outputs", "name", "shape", "datatype", "data", "priority", "timeout"),
    *("binary_data_size", "binary_data", "binary_data_output", "classification", "sequence_id", "BYTES"),
    *("sequence_start", "sequence_end", "text_input", "stream", "max_tokens", "x", "y", "BF16", "BOOL"),
    *(f"{kind}{bits}" for kind in ("INT", "UINT", "FP") for bits in (8, 16, 32, 64)),
)
_TENSOR_TOKENS = [b'"%s"' % word.encode() for word in _TENSOR_WORDS]


def _parse_inference(body: bytes, json_length: str | None) -> None:
    inference = binary_codec.parse_request("m", None, body, json_length)
    request = conversion.build_request(inference, "id", {}, settings.RuntimeSettings())
    for part in request.inputs:
        if part.content_type is not None:
            tensors.from_content_type(part.name, part.value, part.content_type).to_json()


@target([b"\x00" + orjson.dumps(_INFER), b"\x01" + bytes(range(200))], _TENSOR_TOKENS)
def openinference_json(data: bytes) -> None:
    """Parse the JSON of an inference or a generate request, from text or from a generated document."""
    body = data[1:]
    if data[:1] != b"\x00":
        body = json.dumps(build_object(body, _TENSOR_WORDS), default=str).encode()
    with contextlib.suppress(REFUSALS):
        _parse_inference(body, None)
    try:
        document = binary_codec.parse_json_object(body)
        generate.parse_request("m", None, document, True)
    except REFUSALS:
        pass
    for parse in (
        *(embeddings.parse_request, ranking.parse_score, ranking.parse_rerank),
        *(tei.parse_embed, tei.parse_predict, tei.parse_rerank, tei.parse_decode, tei.parse_default),
    ):
        with contextlib.suppress(REFUSALS):
            parse(binary_codec.parse_json_object(body))


@target([b"%d\n" % len(orjson.dumps(_RAW)) + orjson.dumps(_RAW) + b"ab", b"0\nabc"], _TENSOR_TOKENS, 8192)
def openinference_binary(data: bytes) -> None:
    """Parse JSON with raw tensors behind it; the first line is the length of the JSON."""
    length, _, body = data.partition(b"\n")
    with contextlib.suppress(REFUSALS):
        _parse_inference(body, length.decode("latin-1"))


_YAML = b"""minWorkers: 1
maxWorkers: 4
batchSize: 8
handler: {profile: true}
autoscaling: {policy: latency, target_p95_ms: 50}
optimize: [bfloat16]
signature: {inputs: [{name: x, datatype: FP32, shape: [-1]}]}
"""
_DAG = b"""models:
  min-workers: 1
  m1: {url: a.mar}
dag:
  pre: [m1]
  m1: [post]
"""
_STEPS = b"name: w\nsteps:\n  a: {model: m, inputs: request}\n  b: {model: n, inputs: {x: a}}\noutput: b\n"
_YAML_TOKENS = [
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!python/object:",
    b"? ",
    b"- ",
    b": ",
    b"|\n",
    b">\n",
    b"---\n",
    b"{}",
]


@cache
def _yaml_words() -> tuple[str, ...]:
    keys = tuple(f.metadata.get("key", f.name) for f in fields(ModelConfig) if f.metadata)
    return (*keys, *_WORKFLOW_WORDS, *_POLICY_WORDS)


@target(
    [b"\x00" + _YAML, b"\x01" + _DAG, b"\x01" + _STEPS, b"\x02" + bytes(range(120))],
    _YAML_TOKENS,
    max_length=400,
)
def yaml(data: bytes) -> None:
    """Parse a model-config.yaml or a workflow specification, from text or from a generated document."""
    text = data[1:]
    kind = data[:1]
    if kind >= b"\x02":
        text = json.dumps(build_object(text, _yaml_words()), default=str).encode()
    if kind in (b"\x00", b"\x02"):
        with contextlib.suppress(REFUSALS):
            ModelConfig.parse(text)
    if kind != b"\x00":
        with contextlib.suppress(REFUSALS):
            workflow_archive.build_graph("w", workflow_archive.parse(text, "spec.yaml"), "spec.yaml")


@target(
    [
        b"inference_address=http://0.0.0.0:8080\nload_models=all\ndefault_workers_per_model=2\n",
        b'models={"a": {"1.0": {"minWorkers": 1, "maxWorkers": 2, "batchSize": 4}}}\nuse_native_io=true\n',
        b"a\\:b = c\\u0041 \\\n  d\n! x\n# y\n$$HOME$$=1\nallowed_urls=$$X$$\n",
    ],
    [b"\\u", b"$$", b"\\\n", b"=", b"_address=", b"http://", b"https://", b"unix:", b"true", b"models={"],
    max_length=400,
)
def properties(data: bytes) -> None:
    """Parse and translate a config.properties."""
    text = parser.decode(data)
    try:
        parser.parse(text)
        translated = translator.read(text, environment={"X": "file://.*"})
        settings.load(translated.args)
    except REFUSALS:
        pass


_POLICY_WORDS = (
    *("policy", "versions", "key", "salt", "header", "cookie", "json", "labels", "shadow", "default"),
    *("weighted", "sticky", "version", "percent", "compare", "tolerance", "ignore", "1.0", "2.0", "x-user"),
    *("name", "arms", "metrics", "unit", "direction", "increase", "decrease", "alpha", "minimum", "window"),
    *("to", "steps", "interval_s", "guardrails", "error_rate", "latency_p95_ms", "min_requests", "max"),
    *("target_ongoing_requests", "upscale_delay_s", "downscale_delay_s", "look_back_period_s", "latency"),
    *("requests", "target_p95_ms", "events", "experiment", "arm", "value", "request_id", "metric"),
    *("inputs", "outputs", "datatype", "shape", "FP32", "BYTES"),
)
_WORKFLOW_WORDS = (
    *("name", "version", "steps", "model", "inputs", "output", "request", "a", "b", "c", "each", "items"),
    *("timeout_s", "retries", "when", "equals", "function", "dag", "models", "url", "min-workers", "a.mar"),
    *("max-workers", "batch-size", "max-batch-delay", "retry-attempts", "timeout-ms", "m1", "m2"),
)


@target([bytes(range(i, i + 60)) for i in range(0, 180, 20)], max_length=1024)
def policies(data: bytes) -> None:
    """Read a generated document as each kind of policy; an accepted one survives writing and reading."""
    document = build_object(data[1:], (*_POLICY_WORDS, *_WORKFLOW_WORDS))
    readers: Sequence[tuple[Callable[[Any], Any], Callable[[Any], Any] | None]] = (
        (traffic_policy.read, traffic_policy.write),
        (rollout.read, None),
        (experiment.read, None),
        (experiment.read_rewards, None),
        (autoscaling.read, autoscaling.write),
        (workflow_graph.read, None),
        (signature.read, signature.write),
    )
    read, write = readers[data[0] % len(readers)] if data else readers[0]
    try:
        value = read(document)
    except (*REFUSALS, DocumentError):
        return
    if write is not None:
        written = write(value)
        assert write(read(written)) == written


@cache
def _settings_words() -> tuple[str, ...]:
    defaults = settings.Settings()
    sections = [f.name for f in fields(defaults)]
    values = [getattr(defaults, name) for name in sections]
    names = [f.name for value in (*values, PoolSettings()) if is_dataclass(value) for f in fields(value)]
    return (*sections, *names)


@target([bytes(range(i, i + 90)) for i in range(0, 160, 30)], max_length=1024)
def app_settings(data: bytes) -> None:
    """Load generated settings."""
    with contextlib.suppress(REFUSALS):
        settings.load(build_object(data, _settings_words()))


_MANIFEST = b'{"runtime":"python","model":{"modelName":"m","modelVersion":"1","handler":"h.py"}}'
_NAMES = (
    *("MAR-INF/MANIFEST.json", "h.py", "model-config.yaml", "a/b", "a", "a/", "../x", "/etc/x", "a/../../x"),
    *("a" * 260, "d/" * 70 + "x", "\x00", "..", ".", "a//b", "C:\\x", "é", "a/./b", "link", "link/x", "-"),
)
_CONTENTS = (b"", b"x", _MANIFEST, b"{}", b"minWorkers: 1\n", b"0" * 5000, b"[", b"def handle(d, c): pass")
_LIMITS = settings.ModelStoreSettings(max_unpacked_bytes=1 << 20, max_archive_bytes=1 << 20, max_files=50)


def _build_zip(reader: ByteReader) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        while not reader.empty:
            info = zipfile.ZipInfo(reader.pick(_NAMES))
            info.compress_type = zipfile.ZIP_DEFLATED if reader.byte() & 1 else zipfile.ZIP_STORED
            info.external_attr = (reader.byte() << 24) | (reader.byte() << 16)
            packed.writestr(info, reader.pick((*_CONTENTS, *(name.encode() for name in _NAMES))))
    return stream.getvalue()


def _build_tar(reader: ByteReader) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as packed:
        while not reader.empty:
            info = tarfile.TarInfo(reader.pick(_NAMES).replace("\x00", "0"))
            info.type = bytes([reader.pick(b"0123456789gxLKS")])
            info.linkname = reader.pick(_NAMES).replace("\x00", "0")
            info.mode = reader.byte() << 4
            content = reader.pick(_CONTENTS)
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def _damage(packed: bytes, edits: bytes) -> bytes:
    """Overwrite bytes of an archive: three bytes of ``edits`` are a position and a value."""
    damaged = bytearray(packed)
    for i in range(0, len(edits) - 2, 3):
        damaged[int.from_bytes(edits[i : i + 2], "big") % len(damaged)] = edits[i + 2]
    return bytes(damaged)


_NEGATIVE_OFFSET = "03ec2becec03ecececececececec01000000ecececec01000000ececec00000000"


@target(
    [
        *(bytes([kind, 0, *range(40)]) for kind in range(4)),
        b"\x04PK\x03\x04",
        bytes.fromhex(_NEGATIVE_OFFSET),  # raised OSError
        bytes.fromhex("235002acacac8501"),  # a link to a name that is too long raised OSError
        bytes.fromhex("00ffffffffffffffffffffffffffffffffffffff5bff063f500304"),  # a directory MANIFEST.json
    ],
    max_length=512,
)
def archives(data: bytes) -> None:
    """Unpack an archive and read what a registration reads; nothing may appear outside its directory."""
    reader = ByteReader(data)
    kind = reader.byte()
    if kind & 4:
        packed = reader.rest()
    else:
        edits = reader.take(reader.byte() % 16)
        packed = _build_zip(reader) if kind & 1 else _build_tar(reader)
        packed = _damage(packed, edits) if kind & 2 else packed
    parent = Path(tempfile.mkdtemp(dir=_scratch()))
    try:
        file, into = parent / "m.mar", parent / "unpacked"
        file.write_bytes(packed)
        try:
            directory = unpack(file, into, _LIMITS)
        except InvalidArchive:
            assert not into.exists(), "the directory of a refused archive remains"
            return
        finally:
            assert {path.name for path in parent.iterdir()} <= {"m.mar", "unpacked"}
        assert directory.resolve().is_relative_to(into.resolve())
        for path in into.rglob("*"):
            assert path.resolve().is_relative_to(into.resolve()), f"{path} leaves the directory"
        with contextlib.suppress(REFUSALS):
            _ = Archive.read(directory, "m.mar").config
        with contextlib.suppress(REFUSALS):
            workflow_archive.read(directory, "m.war")
    finally:
        shutil.rmtree(parent, ignore_errors=True)


@cache
def _scratch() -> Path | None:
    """Return a folder in memory where there is one: unpacking is bound by the disk otherwise."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else None


@target(
    [b"\x80\x02c__builtin__\neval\nq\x00.", b"\x80\x02}q\x00.", b"\x80\x04\x95\x00", b"(dp0\n."],
    [b"c", b"\x93", b"R.", b"torch._utils\n", b"collections\nOrderedDict\n", b"\x8c\x05posix"],
)
def pickles(data: bytes) -> None:
    """Scan a pickle without loading it."""
    assert isinstance(pickle_scan.find_unsafe_globals(data), set)


_JSON_WORDS = ("a", "b", "data", "instances", "body")


@target([bytes(range(60)), bytes(range(100, 200))], max_length=1024)
def json_values(data: bytes) -> None:
    """Store a generated value as a tensor of each datatype."""
    reader = ByteReader(data)
    datatype, shape = reader.pick(_DATATYPES), [reader.byte() % 4 for _ in range(reader.byte() % 4)]
    try:
        tensor = tensors.from_list("x", datatype, shape, build_value(reader, _JSON_WORDS))
    except REFUSALS:
        return
    again = tensors.from_bytes("x", datatype, shape, tensor.data)
    assert bytes(again.data) == bytes(tensor.data)


_DATATYPES = tuple(word for word in _TENSOR_WORDS if word.isupper())
