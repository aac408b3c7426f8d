"""What the recogniser's numbers say: connectionist temporal classification, the likeliest symbol at each step."""

import torch


def alphabet(session):
    """The recogniser's symbols in the order of its outputs: nothing, those that its ONNX file lists, the space."""
    return ["", *session.get_modelmeta().custom_metadata_map["character"].rstrip("\n").split("\n"), " "]


def texts(probabilities, symbols):
    """For each line of lines x steps x symbols its text, and the mean probability of its symbols.

    A symbol that is repeated without nothing in between is one symbol seen for longer.
    """
    scores, places = probabilities.max(2)
    new = torch.ones_like(places, dtype=torch.bool)
    new[:, 1:] = places[:, 1:] != places[:, :-1]
    kept = new & (places != 0)
    return [
        ("".join(symbols[place] for place in row[mask].tolist()), float(score[mask].mean()) if mask.any() else 0.0)
        for row, score, mask in zip(places, scores, kept)
    ]
