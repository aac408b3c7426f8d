"""Greedy decoding of the recogniser's output (connectionist temporal classification)."""

import torch


def alphabet(session):
    """Return the recogniser's symbols by output index: the blank, those of its ONNX file, the space."""
    return ["", *session.get_modelmeta().custom_metadata_map["character"].rstrip("\n").split("\n"), " "]


def texts(probabilities, symbols):
    """Return the text and the mean probability of each line of lines x steps x symbols.

    Repeated symbols without a blank between them are one symbol.
    """
    scores, indices = probabilities.max(2)
    is_new = torch.ones_like(indices, dtype=torch.bool)
    is_new[:, 1:] = indices[:, 1:] != indices[:, :-1]
    kept = is_new & (indices != 0)
    return [
        (
            "".join(symbols[index] for index in row[mask].tolist()),
            float(score[mask].mean()) if mask.any() else 0.0,
        )
        for row, score, mask in zip(indices, scores, kept)
    ]
