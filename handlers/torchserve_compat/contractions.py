"""English contractions and their full forms."""

from __future__ import annotations

import re

_ENDINGS = {"'d": " would", "'ll": " will", "'m": " am", "'re": " are", "'s": " is", "'ve": " have"}
_STEMS = {  # the words that each ending follows
    "'d": "he i I it she that there they we you",
    "'ll": "he i I it she they we what who you",
    "'m": "i I",
    "'re": "they we what you",
    "'s": "he it she that there what when where who why",
    "'ve": "i I could might must should so they to we what when where who why will would you",
}
_NEGATED = "are could did does do had has have is may might must need ought should was were would"
_IRREGULAR = {
    "ain't": "is not",
    "can't": "cannot",
    "'cause": "because",
    "how'd": "how did",
    "how'll": "how will",
    "how's": "how is",
    "let's": "let us",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "sha'n't": "shall not",
    "shan't": "shall not",
    "so's": "so as",
    "where'd": "where did",
    "won't": "will not",
    "y'all": "you all",
}


def _table() -> dict[str, str]:
    table = dict(_IRREGULAR)
    for ending, words in _STEMS.items():
        table |= {word + ending: word + _ENDINGS[ending] for word in words.split()}
    table |= {f"{word}n't": f"{word} not" for word in _NEGATED.split()}
    return table


CONTRACTION_MAP = _table()
CONTRACTIONS_PATTERN = re.compile("|".join(map(re.escape, CONTRACTION_MAP)), re.IGNORECASE)


def expand(text: str) -> str:
    """Return ``text`` with its contractions expanded and without apostrophes.

    The first letter is kept, so "ain't" becomes "as not": models of existing archives were trained on such
    text. Only the first half of "can't've" is expanded.
    """
    expanded = CONTRACTIONS_PATTERN.sub(lambda match: match[0][0] + _expand_one(match[0])[1:], text)
    return expanded.replace("'", "")


def _expand_one(contraction: str) -> str:
    return CONTRACTION_MAP.get(contraction) or CONTRACTION_MAP[contraction.lower()]
