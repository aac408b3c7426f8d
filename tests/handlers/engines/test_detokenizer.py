"""Tests of incremental detokenization; each token is a byte, or a word."""

from __future__ import annotations

import codecs

from handlers.engines.detokenizer import Detokenizer


def decode_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def detokenize(text: bytes, *stops: str) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(decode_bytes, stops)
    return [emitted for byte in text if (emitted := detokenizer.push([byte]))] + [
        detokenizer.finish()
    ], detokenizer


def test_whole_words_are_emitted() -> None:
    texts, detokenizer = detokenize("Größe zählt, sagt 猫と犬 😀!".encode())
    assert texts == ["Größe ", "zählt,", " ", "sagt ", "猫", "と", "犬", " ", "😀", "!", ""]
    assert detokenizer.text == "Größe zählt, sagt 猫と犬 😀!"


def test_a_very_long_word_is_emitted_in_parts() -> None:
    texts, detokenizer = detokenize(b"a" * 100)
    assert len(texts) > 2
    assert detokenizer.text == "a" * 100


def test_invalid_bytes_are_replaced() -> None:
    broken = b"ok \xff\xfe and \xe7\x8c"
    texts, detokenizer = detokenize(broken)
    assert "".join(texts) == detokenizer.text == broken.decode(errors="replace")
    assert texts[0] == "ok "


def test_tokens_are_decoded_with_their_neighbours() -> None:
    words = ["▁Once", "▁upon", "▁a", "▁ti", "me"]

    def decode(tokens: list[int]) -> str:  # as SentencePiece does: no leading space
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(decode)
    assert [detokenizer.push([token]) for token in range(5)] == ["", "Once ", "upon ", "a ", ""]
    assert detokenizer.finish() == "time"
    assert detokenizer.text == "Once upon a time"


def test_a_text_ends_before_its_stop_string() -> None:
    texts, detokenizer = detokenize(b"one two STOP three", "STOP")
    assert (detokenizer.text, detokenizer.stopped) == ("one two ", True)
    assert "".join(texts) == "one two "

    texts, detokenizer = detokenize(b"one. Two. \n\nThree", " \n\n", "Three")
    assert detokenizer.text == "one. Two."
    assert "".join(texts) == detokenizer.text, "no part of a stop string was emitted before it was complete"

    texts, detokenizer = detokenize(b"a \n b", "\n\n")
    assert (detokenizer.text, detokenizer.stopped) == ("a \n b", False)

    _, detokenizer = detokenize(b"ends with the", "the")
    assert (detokenizer.text, detokenizer.stopped) == ("ends with ", True)


def test_several_tokens_can_be_pushed_at_once() -> None:
    detokenizer = Detokenizer(decode_bytes, ["."])
    assert detokenizer.push(list(b"One two. Three")) == "One two"
    assert detokenizer.stopped
    assert detokenizer.push(list(b"four")) == detokenizer.finish() == ""
    assert codecs.encode(detokenizer.text) == b"One two"
