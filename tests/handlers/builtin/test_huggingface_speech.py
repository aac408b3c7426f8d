"""Tests of model folders of the kind of Whisper, compared with transformers."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.hf_folders import ServedFolder, explain_row, load_error, save_bert
from tests.support.whisper_folders import RATE, encode_wav, make_noise, save_whisper

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.integration]

SHORT, OTHER, LONG = (make_noise(seconds, seed=seed) for seed, seconds in enumerate((1, 1.5, 5)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def served(folder: Path) -> ServedFolder:
    return ServedFolder(folder)


def row(samples: Any, **parameters: Any) -> dict[str, Any]:
    # Of 32 bit, so that transformers reads the same samples.
    content = base64.b64encode(encode_wav(samples, kind=3, bits=32)).decode()
    return {"inputs": content, "parameters": parameters}


def test_texts_equal_transformers(folder: Path, served: ServedFolder) -> None:
    assert served.entry.instance.task_name == "automatic-speech-recognition"
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)

    def reference(samples: Any, **options: Any) -> Any:
        features = processor.feature_extractor(
            samples, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
        )
        with torch.inference_mode():
            ids = model.generate(**features, **{"task": "transcribe", **options})[0]
        return {"text": processor.tokenizer.decode(ids, skip_special_tokens=True)}

    audio = encode_wav(SHORT, kind=3, bits=32)
    detected = served(row(SHORT, details=True))[0]["language"]
    assert served(audio) == [reference(SHORT, language=detected)]
    german = {"language": "german", "task": "translate"}
    answers = served(
        row(SHORT, language="en"),
        row(OTHER, language="english"),
        row(OTHER, **german),
        row(OTHER, language="de", task="translate"),
    )
    expected = [reference(SHORT, language="en"), reference(OTHER, language="en")]
    expected += [reference(OTHER, **german)] * 2
    assert answers == expected
    assert answers[1] != answers[2]
    beams = reference(SHORT, language="en", num_beams=3)
    assert served(row(SHORT, language="en", num_beams=3)) == [beams] != [answers[0]]


def test_long_audio_is_transcribed_window_by_window(folder: Path, served: ServedFolder) -> None:
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    features = processor.feature_extractor(
        LONG,
        sampling_rate=RATE,
        truncation=False,
        padding="longest",
        return_attention_mask=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        [segments] = model.generate(
            **features, return_timestamps=True, return_segments=True, language="en", task="transcribe"
        )["segments"]
    expected = [
        {
            "timestamp": [round(float(segment["start"]), 2), round(float(segment["end"]), 2)],
            "text": processor.tokenizer.decode(segment["tokens"], skip_special_tokens=True),
        }
        for segment in segments
    ]
    assert expected[-1]["timestamp"][1] > 4
    options = {"return_timestamps": True, "language": "en", "details": True}
    long, short, plain = served(row(LONG, **options), row(SHORT, **options), row(LONG, language="en"))
    assert long == {
        "text": "".join(chunk["text"] for chunk in expected),
        "chunks": expected,
        "language": "en",
        "duration": 5.0,
    }
    assert plain == {"text": long["text"]}
    assert (short["duration"], short["text"]) == (1.0, "".join(chunk["text"] for chunk in short["chunks"]))


def test_the_language_is_detected(folder: Path, served: ServedFolder) -> None:
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    found = model.detect_language(extractor(OTHER, sampling_rate=RATE, return_tensors="pt")["input_features"])
    code = {id: token[2:-2] for token, id in model.generation_config.lang_to_id.items()}[int(found)]
    detected, given = served(row(OTHER, details=True), row(OTHER, details=True, language="<|de|>"))
    assert (detected["language"], given["language"]) == (code, "de")


def test_a_prompt_precedes_the_text(served: ServedFolder) -> None:
    without, with_prompt, long, blank = served(
        row(SHORT, language="en"),
        row(SHORT, language="en", prompt="cats hunt mice"),
        row(SHORT, language="en", prompt="cats hunt mice " * 100),
        row(SHORT, language="en", prompt="  "),
    )
    assert "cats" not in with_prompt["text"] and with_prompt != without == blank
    assert isinstance(long["text"], str)


def test_invalid_rows_fail_alone(served: ServedFolder) -> None:
    rows = [
        row(SHORT, language="klingon"),
        row(SHORT, prompt="a <|en|> b"),
        row(SHORT, temperature=2),
        b"ID3" + bytes(40),
        {"inputs": "no base64!"},
        {"inputs": 5},
        row(make_noise(1801, 1000), language="en"),
        row(SHORT, language="en"),
    ]
    rows[6] = encode_wav(make_noise(1801, 1000), 1000, bits=8)
    answers = served(*rows)
    assert [getattr(answer, "error_code", 200) for answer in answers] == [400] * 6 + [413, 200]
    assert "'klingon' is not one of this model's: de, en" in answers[0].message
    assert "The audio is MP3" in answers[3].message
    assert explain_row(served, data=encode_wav(SHORT)).error_code == 501


def test_temperature_samples(served: ServedFolder) -> None:
    torch.manual_seed(0)
    assert len({served(row(SHORT, language="en", temperature=1))[0]["text"] for _ in range(4)}) > 1


def test_an_english_model_has_no_languages(tmp_path: Path) -> None:
    served = ServedFolder(save_whisper(tmp_path, multilingual=False, timestamps=False))
    answer, translated, german, timed, long = served(
        row(SHORT, details=True, language="en"),
        row(SHORT, task="translate"),
        row(SHORT, language="de"),
        row(SHORT, return_timestamps=True),
        row(LONG),
    )
    assert answer["language"] == "en"
    assert [refused.error_code for refused in (translated, german, timed, long)] == [400, 400, 400, 413]


def test_other_folders_are_rejected(tmp_path: Path) -> None:
    assert "is for feature-extraction" in load_error(
        save_bert("BertModel", tmp_path), "automatic-speech-recognition"
    )
    whisper = save_whisper(tmp_path / "whisper")
    assert "is for automatic-speech-recognition, not for sentence-embedding" in load_error(
        whisper, "sentence-embedding"
    )
    for name in ("processor_config.json", "preprocessor_config.json"):
        (whisper / name).unlink(missing_ok=True)
    assert "transformers cannot load it" in load_error(whisper)
