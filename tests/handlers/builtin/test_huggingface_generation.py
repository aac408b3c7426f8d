"""Tests of model folders that generate text, compared with transformers' own pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from handlers.context import Row
from tests.support.hf_folders import (
    LONG,
    SHORT,
    TEXTS,
    ServedFolder,
    assert_close,
    load_error,
    make_pipeline,
    make_tokenizer,
    save_gpt2,
    save_nllb,
    save_t5,
)

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.integration]


def test_a_decoder_without_a_padding_token_generates_and_embeds(tmp_path: Path) -> None:
    save_gpt2(tmp_path)
    served, reference = ServedFolder(tmp_path), make_pipeline("text-generation", tmp_path)
    parameters = {"max_new_tokens": 6}
    shorter = {"text": SHORT, "parameters": {"max_new_tokens": 3}}
    results = served(*({"inputs": text, "parameters": parameters} for text in TEXTS), shorter)
    expected = [reference(text, do_sample=False, **parameters)[0] for text in TEXTS]
    assert results[:3] == expected
    assert expected[0]["generated_text"].startswith(results[3]["generated_text"])
    [rest] = served({"inputs": SHORT, "parameters": {**parameters, "return_full_text": False}})
    assert SHORT + rest["generated_text"] == expected[0]["generated_text"]
    invalid = served(
        {"text": LONG, "parameters": {"max_new_tokens": 40}}, "", {"text": SHORT, "parameters": parameters}
    )
    assert [getattr(row, "error_code", 200) for row in invalid] == [400, 400, 200]
    chat = served({"messages": [{"role": "user", "content": "hello"}]}, {"prompt": "hello"})
    assert all(
        row.error_code == 400 and "register the same folder with handler=llm" in row.message for row in chat
    )

    embedded = ServedFolder(tmp_path, task="sentence-embedding")
    assert_close(embedded(*TEXTS), [embedded(text)[0] for text in TEXTS])


def test_generation_ends_when_all_callers_have_left(tmp_path: Path) -> None:
    save_gpt2(tmp_path)
    served = ServedFolder(tmp_path)
    row = {"inputs": SHORT, "parameters": {"max_new_tokens": 12, "return_full_text": False}}
    [whole] = served(row)
    checks = iter(range(100))
    served.context.begin(["a"], [{}], [{}], None, lambda index: next(checks) >= 3)
    [begun] = served.entry([Row({"body": row})], served.context)
    assert whole["generated_text"].startswith(begun["generated_text"])
    assert len(begun["generated_text"]) < len(whole["generated_text"])
    assert next(checks) == 4, "one check for each token"


def test_numbers_of_a_request_are_bounded(tmp_path: Path) -> None:
    save_t5(tmp_path)  # its positions are relative, so its texts have no longest
    served = ServedFolder(tmp_path, task="summarization")
    invalid: list[dict[str, Any]] = [
        {"do_sample": True, "temperature": 1e-40},
        {"do_sample": True, "repetition_penalty": 1e-40},
        {"num_beams": 65},
        {"num_beams": 64, "max_new_tokens": 1025},
        {"max_new_tokens": 10**400},
    ]
    extreme: dict[str, Any] = {"do_sample": True, "temperature": 1e-5, "repetition_penalty": 0.01}
    rows = [
        {"text": SHORT, "parameters": parameters}
        for parameters in (*invalid, {**extreme, "max_new_tokens": 2})
    ]
    *refused, served_row = served(*rows)
    assert [getattr(row, "error_code", 200) for row in refused] == [400] * len(invalid)
    assert list(served_row) == ["summary_text"]


@pytest.mark.parametrize(
    "task, key",
    [
        ("text2text-generation", "generated_text"),
        ("summarization", "summary_text"),
        ("translation", "translation_text"),
    ],
)
def test_sequence_to_sequence_tasks_equal_transformers(tmp_path: Path, task: str, key: str) -> None:
    prefix = "it is nice " if task == "summarization" else ""
    save_t5(tmp_path, task_specific_params={task: {"prefix": prefix}})
    model, words = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval(), make_tokenizer()
    results = ServedFolder(tmp_path, task=task, parameters={"max_new_tokens": 7})(*TEXTS)
    if task == "translation":
        [error] = ServedFolder(tmp_path, task=task)({"inputs": SHORT, "parameters": {"src_lang": "de"}})
        assert error.error_code == 400 and "one pair of languages" in error.message
    for text, answer in zip(TEXTS, results):
        encoded = words(prefix + text, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**encoded, max_new_tokens=7)
        assert answer == {key: words.decode(ids[0], skip_special_tokens=True)}
    assert any(answer[key] for answer in results)


def test_languages_select_a_prefix(tmp_path: Path) -> None:
    prefixes = {
        ("en", "de"): "this is red ",
        ("en", "fr"): "who sat in Paris ",
        ("fr", "en"): "bad politics ? ",
    }
    specific = {
        f"translation_{source}_to_{target}": {"prefix": prefix}
        for (source, target), prefix in prefixes.items()
    }
    folder = save_t5(tmp_path, task_specific_params={**specific, "summarization": {"prefix": "nice "}})
    served = ServedFolder(folder, task="translation", parameters={"max_new_tokens": 7})

    def make_request(**languages: str) -> dict[str, Any]:
        return {"inputs": SHORT, "parameters": languages}

    results = served(
        *(make_request(src_lang=source, tgt_lang=target) for source, target in prefixes),
        make_request(tgt_lang="de"),
        SHORT,
    )
    plain = ServedFolder(folder, task="text2text-generation", parameters={"max_new_tokens": 7})
    expected = [
        answer["generated_text"] for answer in plain(*(prefix + SHORT for prefix in prefixes.values()), SHORT)
    ]
    assert [answer["translation_text"] for answer in results] == [*expected[:3], expected[0], expected[3]]
    assert len(set(expected)) == 4
    assert (
        served({"inputs": SHORT, "parameters": {"prefix": "this is red ", "tgt_lang": "fr"}}) == results[:1]
    )

    ambiguous, unknown = served(make_request(src_lang="en"), make_request(src_lang="de", tgt_lang="fr"))
    assert ambiguous.error_code == unknown.error_code == 400
    assert (
        "src_lang 'en' and tgt_lang None are too little; it has en to de, en to fr, fr to en."
        in ambiguous.message
    )
    assert "src_lang 'de' and tgt_lang 'fr' are no pair of this model; it has en to de" in unknown.message
    assert "tgt_lang 'klingon' are no pair" in load_error(
        folder, "translation", parameters={"tgt_lang": "klingon"}
    )
    configured = ServedFolder(
        folder, task="translation", parameters={"max_new_tokens": 7, "src_lang": "en", "tgt_lang": "fr"}
    )
    assert configured(SHORT, make_request(tgt_lang="de")) == [results[1], results[0]]


@pytest.mark.parametrize(
    "config",
    [
        {"prefix": "this is red "},
        {"task_specific_params": {"translation_en_to_de": {"prefix": "this is red "}}},
    ],
)
def test_the_only_prefix_of_a_folder_is_put_before_every_text(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = save_t5(tmp_path, **config)
    before, without = "this is red " + SHORT, {"prefix": ""}
    [results] = ServedFolder(folder, task="translation")(SHORT)
    assert results == ServedFolder(folder, task="translation")({"inputs": before, "parameters": without})[0]
    assert results != ServedFolder(folder, task="translation")({"inputs": SHORT, "parameters": without})[0]


def test_languages_select_tokens(tmp_path: Path) -> None:
    save_nllb(tmp_path)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()

    def expected(text: str, source: str, target: str) -> dict[str, str]:
        words.src_lang = source
        ids = model.generate(
            **words(text, return_tensors="pt"),
            max_new_tokens=8,
            forced_bos_token_id=words.convert_tokens_to_ids(target),
        )
        return {"translation_text": words.decode(ids[0], skip_special_tokens=True)}

    def make_request(text: str, **languages: str) -> dict[str, Any]:
        return {"inputs": text, "parameters": languages}

    served = ServedFolder(
        tmp_path, task="translation", parameters={"max_new_tokens": 8, "src_lang": "eng_Latn"}
    )
    german, french = {"tgt_lang": "deu_Latn"}, {"src_lang": "deu_Latn", "tgt_lang": "fra_Latn"}
    results = served(
        make_request("the cat", **german),
        make_request("die katze", **french),
        make_request("a dog", **german),
    )
    assert results == [
        expected("the cat", "eng_Latn", "deu_Latn"),
        expected("die katze", "deu_Latn", "fra_Latn"),
        expected("a dog", "eng_Latn", "deu_Latn"),
    ]
    assert (
        served(make_request("the cat", **german))[0]
        != served(make_request("the cat", tgt_lang="fra_Latn"))[0]
    )
    missing, misspelled, token = served(
        "the cat", make_request("the cat", tgt_lang="deu_Latm"), make_request("the cat", tgt_lang="a")
    )
    assert [row.error_code for row in (missing, misspelled, token)] == [400] * 3
    assert "select one with tgt_lang" in missing.message
    assert "'deu_Latm' is no language of this model; did you mean 'deu_Latn'?" in misspelled.message
    assert "'klingon' is no language" in load_error(
        tmp_path, "translation", parameters={"tgt_lang": "klingon"}
    )
