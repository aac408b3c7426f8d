"""Generates children's drawings with the boxes of what is on them."""

import math
import random

from PIL import Image, ImageDraw

LABELS = ("figure", "house", "sun")
Box = tuple[float, float, float, float]
COLORS = ("#1b1b1b", "#b3261e", "#1a56a8", "#2e7d32", "#8e24aa", "#e08a00")


def draw(seed: int, size: int = 160) -> tuple[Image.Image, list[tuple[int, Box]]]:
    """Return a drawing, and the label and the box of each object."""
    chance = random.Random(seed)
    image = Image.new("RGB", (size, size), chance.choice(["white", "#fffdf5", "#f4f8ff"]))
    pen, objects = ImageDraw.Draw(image), []
    for _ in range(chance.randint(1, 4)):
        for _ in range(20):  # attempts to find a free place
            label = chance.randrange(len(LABELS))
            height = chance.uniform(0.22, 0.45) * size * (0.6 if label == 2 else 1)
            width = height * (0.55 if label == 0 else 1)
            left, top = chance.uniform(2, size - width - 2), chance.uniform(2, size - height - 2)
            box = (left, top, left + width, top + height)
            if all(not _overlap(box, other) for _, other in objects):
                break
        else:
            continue
        (_figure, _house, _sun)[label](pen, box, chance)
        objects.append((label, box))
    for _ in range(chance.randint(0, 12)):  # scribbles
        x, y = chance.uniform(0, size), chance.uniform(0, size)
        pen.line((x, y, x + chance.uniform(-9, 9), y + chance.uniform(-9, 9)), fill=chance.choice(COLORS))
    return image, objects


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _line(pen: ImageDraw.ImageDraw, chance: random.Random, color: str, *points: float) -> None:
    """Draw a line with an unsteady hand."""
    pen.line([p + chance.uniform(-1, 1) for p in points], fill=color, width=chance.choice([1, 2, 2, 3]))


def _figure(pen: ImageDraw.ImageDraw, box: Box, chance: random.Random) -> None:
    left, top, right, bottom = box
    color, middle, height = chance.choice(COLORS), (left + right) / 2, bottom - top
    head = height * chance.uniform(0.12, 0.17)
    pen.ellipse((middle - head, top, middle + head, top + 2 * head), outline=color, width=2)
    hip, shoulder = top + height * 0.65, top + 2 * head + height * 0.08
    _line(pen, chance, color, middle, top + 2 * head, middle, hip)
    _line(pen, chance, color, left, shoulder + chance.uniform(-8, 12), middle, shoulder)
    _line(pen, chance, color, right, shoulder + chance.uniform(-8, 12), middle, shoulder)
    _line(pen, chance, color, middle, hip, left + chance.uniform(0, 4), bottom)
    _line(pen, chance, color, middle, hip, right - chance.uniform(0, 4), bottom)


def _house(pen: ImageDraw.ImageDraw, box: Box, chance: random.Random) -> None:
    left, top, right, bottom = box
    color, roof = chance.choice(COLORS), top + (bottom - top) * chance.uniform(0.3, 0.45)
    for points in ((left, roof, left, bottom), (right, roof, right, bottom), (left, bottom, right, bottom)):
        _line(pen, chance, color, *points)
    _line(pen, chance, color, left, roof, right, roof)
    _line(pen, chance, color, left, roof, (left + right) / 2, top)
    _line(pen, chance, color, right, roof, (left + right) / 2, top)
    entry = (right - left) * 0.18
    pen.rectangle(
        ((left + right) / 2 - entry / 2, bottom - 2 * entry, (left + right) / 2 + entry / 2, bottom),
        outline=color,
    )


def _sun(pen: ImageDraw.ImageDraw, box: Box, chance: random.Random) -> None:
    left, top, right, bottom = box
    color, x, y, radius = (
        chance.choice(COLORS[-1:] + COLORS),
        (left + right) / 2,
        (top + bottom) / 2,
        (right - left) / 2,
    )
    inner = radius * 0.55
    pen.ellipse((x - inner, y - inner, x + inner, y + inner), outline=color, width=2)
    rays = chance.randint(7, 11)
    for ray in range(rays):
        angle = 2 * math.pi * ray / rays
        start, end = inner + 2, radius
        _line(
            pen,
            chance,
            color,
            *(c + f * r for r in (start, end) for c, f in ((x, math.cos(angle)), (y, math.sin(angle)))),
        )
