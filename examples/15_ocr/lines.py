"""Where lines of text are in a picture, and each of them cut out: pure functions around the three networks.

A picture is an array of height x width x 3 bytes: blue, green, red, as PaddleOCR's networks were trained.
"""

from typing import NamedTuple

import cv2
import numpy as np
from PIL import ImageOps

from handlers.vision import ToRGB, open_image

HEIGHT = 48  # of a line, as both networks that look at lines want it
WIDEST = 2400  # a line that is longer is pressed together
SHORT, LONG = 736, 2016  # sides of what the detector sees: the shorter at least, the longer at most
MOST = 1000  # lines of a picture


class Line(NamedTuple):
    corners: np.ndarray  # float32, 4 x (x, y) in the picture's pixels, clockwise from the top left one
    score: float  # how sure the detector is


def picture(content):
    """The picture in these bytes of an image file, turned as its camera was held."""
    image = ToRGB()(ImageOps.exif_transpose(open_image(content)))
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8)[:, :, ::-1])


def detectable(picture):
    """The detector's input, float32 of 1 x 3 x height x width, both sides multiples of 32."""
    height, width = picture.shape[:2]
    scale = min(max(SHORT / min(height, width), 1), LONG / max(height, width))
    sides = [max(round(side * scale / 32), 1) * 32 for side in (width, height)]
    return _normalised(cv2.resize(picture, sides))[None]


def lines(probabilities, size, threshold=0.3, least=0.5, ratio=1.6):
    """The lines in the detector's output for one picture, in reading order.

    ``probabilities`` is height x width, ``size`` the picture's own (width, height). What is above ``threshold`` is
    text; a line whose mean is below ``least`` is none. The network was trained to see lines shrunken (differentiable
    binarization, arXiv:1911.08947), so each grows by ``ratio`` times its area over its perimeter.
    """
    height, width = probabilities.shape
    scale = np.array([size[0] / width, size[1] / height], dtype=np.float32)
    text = cv2.dilate((probabilities > threshold).astype(np.uint8), np.ones((2, 2), np.uint8))
    outlines, _ = cv2.findContours(text, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    found = []
    for outline in outlines[:MOST]:
        centre, sides, angle = cv2.minAreaRect(outline)
        if min(sides) < 3:
            continue
        score = _mean(probabilities, cv2.boxPoints((centre, sides, angle)))
        if score < least:
            continue
        more = ratio * sides[0] * sides[1] / (sides[0] + sides[1])  # half on each side
        grown = cv2.boxPoints((centre, (sides[0] + more, sides[1] + more), angle))
        corners = np.clip(_clockwise(grown) * scale, 0, np.array(size, dtype=np.float32) - 1)
        if min(_sides(corners)) >= 3:
            found.append(Line(corners, score))
    return _as_read(found)


def cut(picture, corners):
    """The line between these corners, upright; one that is much higher than wide is turned to lie."""
    width, height = (max(round(side), 1) for side in _sides(corners))
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], dtype=np.float32)
    turn = cv2.getPerspectiveTransform(np.ascontiguousarray(corners, dtype=np.float32), target)
    strip = cv2.warpPerspective(picture, turn, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    return np.rot90(strip) if height >= 1.5 * width else strip


def width_of(strip):
    """Its width in pixels where its height is HEIGHT."""
    return min(max(-(-HEIGHT * strip.shape[1] // strip.shape[0]), 1), WIDEST)


def readable(strips, width):
    """Strips as float32 of strips x 3 x HEIGHT x ``width``; zeros to the right of a narrower one."""
    batch = np.zeros((len(strips), 3, HEIGHT, width), dtype=np.float32)
    for row, strip in zip(batch, strips):
        own = min(width_of(strip), width)
        row[:, :, :own] = _normalised(cv2.resize(np.ascontiguousarray(strip), (own, HEIGHT)))
    return batch


def _normalised(picture):
    """Bytes as float32 from -1 to 1, channels first."""
    return np.ascontiguousarray((picture.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1))


def _mean(probabilities, corners):
    """Of the probabilities between these corners."""
    low = np.maximum(np.floor(corners.min(0)).astype(int), 0)
    high = np.ceil(corners.max(0)).astype(int) + 1
    part = np.ascontiguousarray(probabilities[low[1] : high[1], low[0] : high[0]])
    mask = np.zeros(part.shape, np.uint8)
    cv2.fillPoly(mask, [(corners - low).astype(np.int32)], 1)
    return cv2.mean(part, mask)[0]


def _clockwise(corners):
    """From the top left one on."""
    by_x = corners[np.argsort(corners[:, 0])]
    left, right = by_x[:2], by_x[2:]
    top_left, bottom_left = left[np.argsort(left[:, 1])]
    top_right, bottom_right = right[np.argsort(right[:, 1])]
    return np.array([top_left, top_right, bottom_right, bottom_left], dtype=np.float32)


def _sides(corners):
    """Width and height: the longer of each two sides that lie opposite."""
    first, second, third, fourth = corners
    width = max(np.linalg.norm(second - first), np.linalg.norm(third - fourth))
    return float(width), float(max(np.linalg.norm(fourth - first), np.linalg.norm(third - second)))


def _as_read(found):
    """From the top down; lines that stand beside each other from left to right."""
    rows = []
    for line in sorted(found, key=lambda line: line.corners[:, 1].mean()):
        middle, height = line.corners[:, 1].mean(), _sides(line.corners)[1]
        if rows and abs(middle - rows[-1][-1].corners[:, 1].mean()) < height / 2:
            rows[-1].append(line)
        else:
            rows.append([line])
    return [line for row in rows for line in sorted(row, key=lambda line: line.corners[:, 0].min())]
