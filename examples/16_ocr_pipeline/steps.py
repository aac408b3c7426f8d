"""The steps between the three models: plain functions, called with their inputs by name."""

import cv2
import numpy as np
from lines import crop_line, decode_image


def crop(image, lines):
    """Return the detected lines as cropped PNG images."""
    decoded = decode_image(image)
    return [png(crop_line(decoded, np.array(line["corners"], dtype=np.float32))) for line in lines]


def turn(strips, directions):
    """Return the strips with upside-down ones rotated by 180 degrees."""
    upside_down = [direction["upside_down"] > 0.9 for direction in directions]
    return [
        png(np.rot90(decode_image(strip), 2)) if rotate else strip
        for strip, rotate in zip(strips, upside_down)
    ]


def join(lines, results, min_score=0.5):
    """Return the texts with their boxes, without those of a low score."""
    return [
        {
            "text": result["text"],
            "box": np.rint(line["corners"]).astype(int).tolist(),
            "score": result["score"],
        }
        for line, result in zip(lines, results)
        if result["text"] and result["score"] >= min_score
    ]


def png(strip):
    return cv2.imencode(".png", strip)[1].tobytes()
