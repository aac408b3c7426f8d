"""Pre- and postprocessing of the three networks: find lines of text in an image, and crop them.

An image is an array of height x width x 3 bytes: blue, green, red, as PaddleOCR's networks were trained.
"""

from typing import NamedTuple

import cv2
import numpy as np
from PIL import ImageOps

from handlers.builtin.vision import ToRGB, open_image

LINE_HEIGHT = 48  # of the input of both networks for lines
MAX_LINE_WIDTH = 2400  # longer lines are compressed
MIN_SHORT_SIDE, MAX_LONG_SIDE = 736, 2016  # of the detector's input
MAX_LINES = 1000  # of an image


class Line(NamedTuple):
    corners: np.ndarray  # float32, 4 x (x, y) in the image's pixels, clockwise from the top left one
    score: float  # the detector's mean probability


def decode_image(content):
    """Decode an image file, rotated by its EXIF orientation."""
    image = ToRGB()(ImageOps.exif_transpose(open_image(content)))
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8)[:, :, ::-1])


def detector_input(image):
    """Return the detector's input: float32, 1 x 3 x height x width, both sides multiples of 32."""
    height, width = image.shape[:2]
    scale = min(max(MIN_SHORT_SIDE / min(height, width), 1), MAX_LONG_SIDE / max(height, width))
    sides = [max(round(side * scale / 32), 1) * 32 for side in (width, height)]
    return _normalise(cv2.resize(image, sides))[None]


def find_lines(probabilities, size, threshold=0.3, min_score=0.5, ratio=1.6):
    """Return the lines in the detector's output for one image, in reading order.

    ``probabilities`` is height x width, ``size`` the image's (width, height). Pixels above ``threshold`` are
    text; lines with a mean below ``min_score`` are dropped. The network was trained on shrunken lines
    (differentiable binarization, arXiv:1911.08947), so each is expanded by ``ratio`` times its area over its
    perimeter.
    """
    height, width = probabilities.shape
    scale = np.array([size[0] / width, size[1] / height], dtype=np.float32)
    text = cv2.dilate((probabilities > threshold).astype(np.uint8), np.ones((2, 2), np.uint8))
    outlines, _ = cv2.findContours(text, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    found = []
    for outline in outlines[:MAX_LINES]:
        centre, sides, angle = cv2.minAreaRect(outline)
        if min(sides) < 3:
            continue
        score = _mean_inside(probabilities, cv2.boxPoints((centre, sides, angle)))
        if score < min_score:
            continue
        growth = ratio * sides[0] * sides[1] / (sides[0] + sides[1])  # half on each side
        grown = cv2.boxPoints((centre, (sides[0] + growth, sides[1] + growth), angle))
        corners = np.clip(_order_clockwise(grown) * scale, 0, np.array(size, dtype=np.float32) - 1)
        if min(_side_lengths(corners)) >= 3:
            found.append(Line(corners, score))
    return _reading_order(found)


def crop_line(image, corners):
    """Crop and straighten the line between the corners; rotate one that is much higher than wide."""
    width, height = (max(round(side), 1) for side in _side_lengths(corners))
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], dtype=np.float32)
    transform = cv2.getPerspectiveTransform(np.ascontiguousarray(corners, dtype=np.float32), target)
    strip = cv2.warpPerspective(
        image, transform, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
    )
    return np.rot90(strip) if height >= 1.5 * width else strip


def scaled_width(strip):
    """Return the width in pixels of a strip that is scaled to LINE_HEIGHT."""
    return min(max(-(-LINE_HEIGHT * strip.shape[1] // strip.shape[0]), 1), MAX_LINE_WIDTH)


def recogniser_input(strips, width):
    """Return strips as float32 of strips x 3 x LINE_HEIGHT x ``width``, padded on the right with zeros."""
    batch = np.zeros((len(strips), 3, LINE_HEIGHT, width), dtype=np.float32)
    for row, strip in zip(batch, strips):
        strip_width = min(scaled_width(strip), width)
        row[:, :, :strip_width] = _normalise(
            cv2.resize(np.ascontiguousarray(strip), (strip_width, LINE_HEIGHT))
        )
    return batch


def _normalise(image):
    """Convert bytes to float32 from -1 to 1, channels first."""
    return np.ascontiguousarray((image.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1))


def _mean_inside(probabilities, corners):
    """Return the mean of the probabilities between the corners."""
    low = np.maximum(np.floor(corners.min(0)).astype(int), 0)
    high = np.ceil(corners.max(0)).astype(int) + 1
    part = np.ascontiguousarray(probabilities[low[1] : high[1], low[0] : high[0]])
    mask = np.zeros(part.shape, np.uint8)
    cv2.fillPoly(mask, [(corners - low).astype(np.int32)], 1)
    return cv2.mean(part, mask)[0]


def _order_clockwise(corners):
    """Order four corners clockwise from the top left one."""
    by_x = corners[np.argsort(corners[:, 0])]
    left, right = by_x[:2], by_x[2:]
    top_left, bottom_left = left[np.argsort(left[:, 1])]
    top_right, bottom_right = right[np.argsort(right[:, 1])]
    return np.array([top_left, top_right, bottom_right, bottom_left], dtype=np.float32)


def _side_lengths(corners):
    """Return width and height: the longer of each two opposite sides."""
    first, second, third, fourth = corners
    width = max(np.linalg.norm(second - first), np.linalg.norm(third - fourth))
    return float(width), float(max(np.linalg.norm(fourth - first), np.linalg.norm(third - second)))


def _reading_order(found):
    """Sort lines from top to bottom, and lines beside each other from left to right."""
    rows = []
    for line in sorted(found, key=lambda line: line.corners[:, 1].mean()):
        middle, height = line.corners[:, 1].mean(), _side_lengths(line.corners)[1]
        if rows and abs(middle - rows[-1][-1].corners[:, 1].mean()) < height / 2:
            rows[-1].append(line)
        else:
            rows.append([line])
    return [line for row in rows for line in sorted(row, key=lambda line: line.corners[:, 0].min())]
