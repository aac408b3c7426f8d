"""What happens between the three models: plain functions, called with their inputs by name."""

import cv2
import numpy as np
from lines import cut, picture


def crop(image, found):
    """Each line that was found, cut out: PNG images."""
    whole = picture(image)
    return [png(cut(whole, np.array(line["corners"], dtype=np.float32))) for line in found]


def turn(strips, directions):
    """The strips, and those turned by half a circle which stand on their heads."""
    heads = [direction["upside_down"] > 0.9 for direction in directions]
    return [png(np.rot90(picture(strip), 2)) if head else strip for strip, head in zip(strips, heads)]


def join(found, read, least=0.5):
    """The texts with their places; what was hardly read is left out."""
    return [
        {"text": said["text"], "box": np.rint(line["corners"]).astype(int).tolist(), "score": said["score"]}
        for line, said in zip(found, read)
        if said["text"] and said["score"] >= least
    ]


def png(strip):
    return cv2.imencode(".png", strip)[1].tobytes()
