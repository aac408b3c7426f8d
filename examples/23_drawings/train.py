"""Train the detector on generated drawings in about a minute, and archive it as drawings.mar."""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from drawings import draw
from model import CLASSES, STRIDE, Detector
from safetensors.torch import save_file
from torch.nn import functional

from serve_app.model_store.archiver import ArchiveRecipe, make

HERE = Path(__file__).resolve().parent
TRAINING, TEST = 400, 60  # drawings


def to_tensor(image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def to_target(objects, cells: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the heat map with a bump at each centre, the sizes, and which cells are centres."""
    heat, sizes, centres = (
        torch.zeros(CLASSES, cells, cells),
        torch.zeros(2, cells, cells),
        torch.zeros(cells, cells),
    )
    y, x = torch.meshgrid(torch.arange(cells), torch.arange(cells), indexing="ij")
    for label, (left, top, right, bottom) in objects:
        column, row = int((left + right) / 2 / STRIDE), int((top + bottom) / 2 / STRIDE)
        bump = torch.exp(-((x - column) ** 2 + (y - row) ** 2) / (2 * 1.2**2))
        heat[label] = torch.maximum(heat[label], bump)
        sizes[:, row, column] = torch.tensor([right - left, bottom - top]) / STRIDE
        centres[row, column] = 1
    return heat, sizes, centres


def loss_of(model: Detector, images, heat, sizes, centres) -> torch.Tensor:
    """The focal loss of the heat map (Law and Deng, CornerNet, 2018), and the sizes' error at the centres."""
    logits, found = model.heads(images)
    chance = logits.sigmoid().clamp(1e-4, 1 - 1e-4)
    is_centre = heat == 1
    right = -((1 - chance) ** 2 * chance.log())[is_centre].sum()
    wrong = -((1 - heat) ** 4 * chance**2 * (1 - chance).log())[~is_centre].sum()
    size = (functional.l1_loss(found, sizes, reduction="none") * centres[:, None]).sum()
    return (right + wrong + 0.2 * size) / centres.sum()


def train(epochs: int) -> Detector:
    torch.manual_seed(0)
    made = [draw(seed) for seed in range(TRAINING)]
    images = torch.stack([to_tensor(image) for image, _ in made])
    targets = [torch.stack(part) for part in zip(*(to_target(objects, 160 // STRIDE) for _, objects in made))]
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=epochs * -(-TRAINING // 16))
    for _ in range(epochs):
        for batch in torch.randperm(TRAINING).split(16):
            optimizer.zero_grad()
            loss_of(model, images[batch], *(part[batch] for part in targets)).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def evaluate(model: Detector) -> tuple[float, float]:
    """Return precision and recall on new drawings; a box is right at an overlap (IoU) of one half."""
    right = found = wanted = 0
    for seed in range(TRAINING, TRAINING + TEST):
        image, objects = draw(seed)
        with torch.inference_mode():
            [seen] = model(to_tensor(image)[None])
        boxes = [
            (int(c), b.tolist()) for c, b, s in zip(seen["labels"], seen["boxes"], seen["scores"]) if s >= 0.5
        ]
        right += sum(any(c == label and overlap(box, b) >= 0.5 for c, b in boxes) for label, box in objects)
        found, wanted = found + len(boxes), wanted + len(objects)
    return right / max(found, 1), right / wanted


def overlap(a, b) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def archive(model: Detector, store: Path) -> Path:
    """Write drawings.mar atomically: weights, model file and samples; the handler is a built-in one."""
    store.mkdir(parents=True, exist_ok=True)
    os.chdir(HERE)
    with tempfile.TemporaryDirectory(dir=store, prefix=".drawings-") as scratch:
        samples = Path(scratch, "samples")
        samples.mkdir()
        for seed in range(1, 4):
            draw(5000 + seed)[0].save(samples / f"drawing_{seed}.png")
        weights = Path(scratch, "drawings.safetensors")
        save_file(model.state_dict(), weights)
        recipe = ArchiveRecipe(
            model_name="drawings",
            version="1.0",
            model_file="model.py",
            serialized_file=str(weights),
            handler="object_detector",
            extra_files=f"index_to_name.json,{samples}",
            config_file="model-config.yaml",
            export_path=scratch,
        )
        return make(recipe).path.replace(store / "drawings.mar")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    model = train(options.epochs)
    print("precision and recall on {} new drawings: {:.2f}, {:.2f}".format(TEST, *evaluate(model)))
    print(f"archived as {archive(model, options.model_store.resolve())}")
