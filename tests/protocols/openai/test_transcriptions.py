"""OpenAI's routes of audio, called by OpenAI's client with a tiny model, and by forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse
from tests.support.served_models import ServedModel, save_word_bert, serve
from tests.support.whisper_folders import encode_wav, make_noise, save_whisper

AUDIO = encode_wav(make_noise(1), kind=3, bits=32)
FILE = ("speech.wav", AUDIO, "audio/wav")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    whisper = save_whisper(tmp_path_factory.mktemp("whisper"))
    vectors = save_word_bert(tmp_path_factory.mktemp("vectors"))
    served = [
        ServedModel("whisper", whisper, "huggingface", {}),
        ServedModel("vectors", vectors, "huggingface", {}),
    ]
    with serve(served) as address:
        yield address


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.integration
def test_audio_is_transcribed(server: str, client: openai.OpenAI) -> None:
    whole = client.audio.transcriptions.create(model="whisper", file=FILE, language="en")
    plain = httpx.post(
        f"{server}/predictions/whisper", content=AUDIO, headers={"content-type": "audio/wav"}, timeout=60
    )
    assert plain.json().keys() == {"text"}
    assert whole.usage is not None and whole.usage.to_dict() == {"type": "duration", "seconds": 1}
    text = client.audio.transcriptions.create(
        model="whisper:1.0", file=FILE, language="en", response_format="text"
    )
    assert text == f"{whole.text.strip()}\n"
    verbose: Any = client.audio.transcriptions.create(
        model="whisper", file=FILE, language="en", response_format="verbose_json", temperature=0,
        prompt="cats", timestamp_granularities=["segment"],
    )  # fmt: skip
    assert (verbose.task, verbose.language, verbose.duration) == ("transcribe", "en", 1.0)
    assert "".join(segment.text for segment in verbose.segments) == verbose.text
    assert [segment.id for segment in verbose.segments] == list(range(len(verbose.segments)))
    translated = httpx.post(
        f"{server}/v1/audio/translations", data={"model": "whisper"}, files={"file": FILE}, timeout=60
    )
    assert translated.json()["text"]
    for response_format, start in (("srt", "1\n00:00:0"), ("vtt", "WEBVTT\n\n00:00:0")):
        options: Any = {
            "model": "whisper",
            "file": FILE,
            "language": "en",
            "response_format": response_format,
        }
        subtitles: Any = client.audio.transcriptions.create(**options)
        assert subtitles.startswith(start) and " --> " in subtitles


@pytest.mark.integration
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"file": ("a.mp3", b"ID3" + bytes(40), "audio/mpeg")}, "The audio is MP3, and only WAV is read"),
        ({"language": "xx"}, "'xx' is not one of this model's"),
        ({"model": "vectors"}, "no output transcription; there are token_embeddings"),
        ({"response_format": "docx"}, "response_format is one of"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"temperature": 1.5}, "temperature is '1.5'"),
        ({"stream": True}, "stream is not served"),
    ],
)
def test_requests_that_cannot_be_served_are_rejected(
    client: openai.OpenAI, options: Any, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        client.audio.transcriptions.create(**{"model": "whisper", "file": FILE, **options})


def post(app: Any, fields: dict[str, Any], path: str = "transcriptions") -> Any:
    """Send a form; values that are tuples are files."""
    files = {name: value if isinstance(value, tuple) else (None, value) for name, value in fields.items()}
    request = httpx.Request("POST", "http://server", files=files)
    return app("POST", f"/v1/audio/{path}", request.read(), {"content-type": request.headers["content-type"]})


def answer(document: Any) -> Any:
    async def respond(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(json.dumps(document).encode(), version="1.0")

    return respond


CHUNKS = [
    {"timestamp": [0, 1.5], "text": " Cats hunt."},
    {"timestamp": [3661.0004, None], "text": " a --> b\n\n c"},
]


@pytest.mark.parametrize("times", [["nan", 1], [1e308, 1e308], [-1, 0], ["a", 1], 3])
def test_times_that_are_none_are_refused(inference: Any, times: Any) -> None:
    app = inference(answer({"text": "a", "chunks": [{"timestamp": times, "text": "a"}]}))
    app.compares = False
    for response_format in ("srt", "verbose_json"):
        response = post(app, {"model": "m", "file": FILE, "response_format": response_format})
        assert (response.status, json.loads(response.body)["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize("duration", ["long", [1], 1e308, -1, None])
def test_durations_that_are_no_times_are_left_out(inference: Any, duration: Any) -> None:
    app = inference(answer({"text": "a", "chunks": CHUNKS[:1], "duration": duration}))
    app.compares = False
    form = {"model": "m", "file": FILE}
    assert json.loads(post(app, form).body) == {"text": "a"}
    document = json.loads(post(app, {**form, "response_format": "verbose_json"}).body)
    assert (document["duration"], "usage" in document) == (1.5, False)


def test_subtitles(inference: Any) -> None:
    form = {"model": "m", "file": FILE, "zz": "1"}
    app = inference(answer({"text": "a", "chunks": CHUNKS, "duration": 3662.5, "language": "de"}))
    app.compares = False  # forms have random boundaries
    response = post(app, {**form, "response_format": "srt"})
    assert (response["content-type"], response["x-torchrelay-ignored"]) == ("text/plain; charset=utf-8", "zz")
    assert response.body.decode() == (
        "1\n00:00:00,000 --> 00:00:01,500\nCats hunt.\n\n2\n01:01:01,000 --> 01:01:01,000\na -> b\n c\n"
    )
    response = post(app, {**form, "response_format": "vtt"})
    assert response["content-type"] == "text/vtt; charset=utf-8"
    assert response.body.startswith(
        b"WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nCats hunt.\n\n01:01:01.000 -->"
    )
    document = json.loads(post(app, {**form, "response_format": "verbose_json"}, "translations").body)
    assert (document["task"], document["usage"]["seconds"], len(document["segments"])) == (
        "translate",
        3663,
        2,
    )
    request: InferenceRequest = app.backend.requests[-1]
    parts = {part.name: part.value for part in request.inputs}
    assert parts["data"] == AUDIO
    assert json.loads(parts["parameters"]) == {
        "output_value": "transcription",
        "task": "translate",
        "details": True,
        "return_timestamps": True,
    }
    assert request.headers["url_path"] == "v1/audio/translations"


@pytest.mark.parametrize(
    ("fields", "document", "param"),
    [
        ({"file": FILE}, {}, "model"),
        ({"model": "m"}, {}, "file"),
        ({"model": "m", "file": ("a.wav", b"")}, {}, "file"),
        ({"model": b"\xff", "file": FILE}, {}, "model"),
        ({"model": "m", "file": FILE}, {"texts": 1}, "model"),
        ({"model": "m", "file": FILE, "response_format": "vtt"}, {"text": "a"}, "response_format"),
        (
            {"model": "m", "file": FILE, "response_format": "srt"},
            {"text": "a", "chunks": [3]},
            "response_format",
        ),
        ({"model": "m", "file": FILE, "temperature": "warm"}, {}, "temperature"),
        ({"model": "m", "file": FILE, "prompt": b"\xff"}, {}, "prompt"),
    ],
)
def test_invalid_forms_name_the_field(inference: Any, fields: Any, document: Any, param: str) -> None:
    app = inference(answer(document))
    app.compares = False  # forms have random boundaries
    response = post(app, fields)
    assert (response.status, json.loads(response.body)["error"]["param"]) == (400, param), response.body


def test_other_bodies_are_rejected(inference: Any) -> None:
    for content_type, body in (
        ("application/json", b'{"model": "m"}'),
        ("multipart/form-data; boundary=x", b"--x\r\n"),
        ("multipart/form-data", b""),
    ):
        response = inference(answer({}))(
            "POST", "/v1/audio/transcriptions", body, {"content-type": content_type}
        )
        assert (response.status, json.loads(response.body)["error"]["code"]) == (400, "invalid_body")
    assert inference(answer({}))("GET", "/v1/audio/transcriptions").status == 405
    large = inference(answer({}), max_request_size=100)
    large.compares = False
    assert post(large, {"model": "m", "file": FILE}).status == 413
