"""The functions between the models: search by vectors, and the sentence that answers."""

import json
import re
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
PASSAGES = json.loads((HERE / "passages.json").read_text())
VECTORS = np.load(HERE / "vectors.npy").astype(np.float32)


def search(question, vector, most=12):
    """Return the passages nearest to the question, as pairs for the ranker."""
    vector = json.loads(vector) if isinstance(vector, bytes | str) else vector
    nearest = np.argsort(-(VECTORS @ np.asarray(vector, np.float32)))[:most]
    return [
        {**p, "passage": p["text"], "text": question, "text_pair": f"{p['section']}. {p['text']}"}
        for p in (PASSAGES[i] for i in nearest)
    ]


def answer(question, found, scores):
    """Return the best passage with the sentence that shares most words with the question, and the next."""
    ranked = sorted(zip(scores, found), key=lambda pair: -pair[0])
    best = ranked[0][1]
    wanted = words(question)
    sentences = re.split(r"(?<=[.;]) ", best["passage"])
    return {
        "answer": max(sentences, key=lambda sentence: len(wanted & words(sentence))),
        "page": best["page"],
        "section": best["section"],
        "score": round(ranked[0][0], 3),
        "others": [
            {"page": p["page"], "section": p["section"], "score": round(s, 3)} for s, p in ranked[1:4]
        ],
    }


def words(text):
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) > 3}
