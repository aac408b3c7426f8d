"""Batch size against throughput of a BERT-size NER model, in PyTorch and ONNX Runtime, fp32 and fp16, drawn.

    python measure.py                                # on the GPU: bert-base, 128 tokens, batches of 1 to 64
    python measure.py --device cpu --layers 2 --hidden 128 --batches 1,4

The weights are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.transformers.float16 import convert_float_to_float16
from transformers import BertConfig, BertForTokenClassification

LABELS = 9  # of CoNLL-2003's entities: O, and B and I of four kinds
TORCH, ONNX = "PyTorch", "ONNX Runtime"
Forward = Callable[[np.ndarray], np.ndarray]  # token ids [batch, length] -> logits [batch, length, labels]


class Logits(torch.nn.Module):
    """The network as a function from ids to logits, as an exporter wants it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits


def network(layers: int, hidden: int) -> Logits:
    torch.manual_seed(0)
    heads = max(1, hidden // 64)
    config = BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        num_labels=LABELS,
    )
    return Logits(BertForTokenClassification(config)).eval()


def in_torch(model: Logits, device: str, half: bool) -> Forward:
    moved = model.half() if half else model.float()
    moved = moved.to(device)

    def forward(ids: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return moved(torch.from_numpy(ids).to(device)).float().cpu().numpy()  # the copy back waits for the device

    return forward


def exported(model: Logits, length: int, file: Path) -> None:
    batch, tokens = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("tokens", min=2, max=512)
    ids = torch.randint(1000, (2, length))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, about what it will be one day
        program = torch.onnx.export(
            model.float().cpu(), (ids,), dynamo=True, dynamic_shapes={"ids": {0: batch, 1: tokens}}, verbose=False
        )
        program.save(file)


def in_onnx(file: Path, device: str, half: bool) -> Forward:
    provider = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}[device]
    source: bytes | str = str(file)
    if half:
        source = convert_float_to_float16(onnx.load(file), keep_io_types=True).SerializeToString()
    session = onnxruntime.InferenceSession(source, providers=[provider])
    if session.get_providers()[0] != provider:  # it falls back without a word
        cure = "install onnxruntime-gpu in place of onnxruntime, for this CUDA"
        raise SystemExit(f"ONNX Runtime cannot use {provider}; {cure}")
    [name] = [each.name for each in session.get_inputs()]
    return lambda ids: session.run(None, {name: ids})[0]


def throughput(forward: Forward, batch: int, length: int, seconds: float) -> float:
    """Rows a second: the median of five windows, after a warm-up."""
    ids = np.random.default_rng(0).integers(0, 1000, (batch, length))
    for _ in range(3):
        forward(ids)
    found = []
    for _ in range(5):
        began, rows = time.perf_counter(), 0
        while not rows or time.perf_counter() - began < seconds / 5:
            forward(ids)
            rows += batch
        found.append(rows / (time.perf_counter() - began))
    return statistics.median(found)


def draw(figures: dict[str, dict[int, float]], folder: Path, title: str) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = list(next(iter(figures.values())))

    def lines(name: str, about: str) -> Path:
        picture, axes = pyplot.subplots(figsize=(7, 4.5))
        for variant, rates in figures.items():
            axes.plot(batches, list(rates.values()), marker="o", label=variant)
        axes.set(xlabel="batch size", ylabel="rows a second", title=f"{about}\n{title}")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.legend()
        axes.grid(alpha=0.3)
        picture.savefig(folder / name, dpi=150, bbox_inches="tight")
        pyplot.close(picture)
        return folder / name

    def bars(name: str, about: str, pairs: list[tuple[str, str]]) -> Path:
        picture, axes = pyplot.subplots(figsize=(7, 4.5))
        for shift, (fast, slow) in zip((-0.2, 0.2), pairs):
            ratios = [figures[fast][batch] / figures[slow][batch] for batch in batches]
            axes.bar([place + shift for place in range(len(batches))], ratios, 0.4, label=f"{fast} over {slow}")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xlabel="batch size", ylabel="times as fast", title=f"{about}\n{title}")
        axes.set_xticks(range(len(batches)), list(map(str, batches)))
        axes.legend()
        picture.savefig(folder / name, dpi=150, bbox_inches="tight")
        pyplot.close(picture)
        return folder / name

    engines = [(f"{ONNX} {number}", f"{TORCH} {number}") for number in ("fp32", "fp16")]
    numbers = [(f"{engine} fp16", f"{engine} fp32") for engine in (TORCH, ONNX)]
    return [
        lines("throughput_by_batch_size.png", "Throughput by batch size"),
        bars("onnx_against_pytorch.png", "ONNX Runtime against PyTorch", engines),
        bars("fp16_against_fp32.png", "fp16 against fp32", numbers),
    ]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked.add_argument("--batches", default="1,2,4,8,16,32,64")
    asked.add_argument("--length", type=int, default=128, help="tokens of a row")
    asked.add_argument("--layers", type=int, default=12)
    asked.add_argument("--hidden", type=int, default=768)
    asked.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    asked.add_argument("--folder", type=Path, default=Path("figures"))
    options = asked.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("No GPU is here that torch can use; --device cpu measures on the CPU.")
    device, batches = options.device, [int(batch) for batch in options.batches.split(",")]
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    model = network(options.layers, options.hidden)
    options.folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict[int, float]] = {}
    ids = np.random.default_rng(1).integers(0, 1000, (2, options.length))
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "ner.onnx"
        print("exporting to ONNX ...", flush=True)
        exported(model, options.length, file)
        wanted = in_torch(model, "cpu", False)(ids)
        variants = {
            f"{TORCH} fp32": lambda: in_torch(model, device, False),
            f"{TORCH} fp16": lambda: in_torch(model, device, True),
            f"{ONNX} fp32": lambda: in_onnx(file, device, False),
            f"{ONNX} fp16": lambda: in_onnx(file, device, True),
        }
        for name, make in variants.items():
            forward = make()
            off = float(np.abs(forward(ids) - wanted).max())
            figures[name] = {batch: throughput(forward, batch, options.length, options.seconds) for batch in batches}
            said = "  ".join(f"{batch}: {rate:,.0f}/s" for batch, rate in figures[name].items())
            print(f"{name:<18} {said}   (logits differ by {off:.1e} at most)", flush=True)
    title = f"NER, {options.layers} layers of {options.hidden}, {options.length} tokens, {where}"
    (options.folder / "throughput.json").write_text(json.dumps({"about": title, "rows_per_second": figures}, indent=2))
    for picture in draw(figures, options.folder, title):
        print(f"drawn: {picture}")


if __name__ == "__main__":
    main()
