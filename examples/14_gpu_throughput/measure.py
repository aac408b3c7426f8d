"""Measure and draw the throughput of a NER model by batch size, in PyTorch and ONNX Runtime.

    python measure.py                                # on the GPU: bert-base, 128 tokens, batches of 1 to 64
    python measure.py --device cpu --layers 2 --hidden 128 --batches 1,4
    python measure.py --device cpu --model ../../model_store/entities --length 32 --batches 1,4,16

Without --model the weights are random: speed does not depend on them. With it, the share of tokens that get
the label of PyTorch in fp32 is that of a trained model.
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
from transformers import AutoModelForTokenClassification, BertConfig, BertForTokenClassification

LABELS = 9  # of CoNLL-2003: O, and B and I of four kinds of entities
TORCH, ONNX = "PyTorch", "ONNX Runtime"
Forward = Callable[[np.ndarray], np.ndarray]  # token ids [batch, length] -> logits [batch, length, labels]


class Logits(torch.nn.Module):
    """The network as a module from ids to logits, for the exporter."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits


def load_network(folder: Path) -> Logits:
    """Return a saved model, such as the one that example 10 trains."""
    return Logits(AutoModelForTokenClassification.from_pretrained(folder).float()).eval()


def build_network(layers: int, hidden: int) -> Logits:
    """Return a model of random weights."""
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


def torch_forward(model: Logits, device: str, half: bool) -> Forward:
    model_on_device = (model.half() if half else model.float()).to(device)

    def forward(ids: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            logits = model_on_device(torch.from_numpy(ids).to(device))
            return logits.float().cpu().numpy()  # the copy waits for the device

    return forward


def draw_ids(model: Logits, batch: int, length: int) -> np.ndarray:
    """Return random tokens of the model's vocabulary."""
    return np.random.default_rng(batch).integers(0, model.model.config.vocab_size, (batch, length))


def export(model: Logits, length: int, file: Path) -> None:
    longest = model.model.config.max_position_embeddings
    batch, tokens = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("tokens", min=2, max=longest)
    ids = torch.from_numpy(draw_ids(model, 2, length))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter announces its own changes
        program = torch.onnx.export(
            model.float().cpu(),
            (ids,),
            dynamo=True,
            dynamic_shapes={"ids": {0: batch, 1: tokens}},
            verbose=False,
        )
        program.save(file)


def onnx_forward(file: Path, device: str, half: bool) -> Forward:
    provider = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}[device]
    source: bytes | str = str(file)
    if half:
        source = convert_float_to_float16(onnx.load(file), keep_io_types=True).SerializeToString()
    session = onnxruntime.InferenceSession(source, providers=[provider])
    if session.get_providers()[0] != provider:  # it falls back silently
        cure = "install onnxruntime-gpu in place of onnxruntime, for this CUDA"
        raise SystemExit(f"ONNX Runtime cannot use {provider}; {cure}")
    [name] = [argument.name for argument in session.get_inputs()]
    return lambda ids: session.run(None, {name: ids})[0]


def throughput(forward: Forward, ids: np.ndarray, seconds: float) -> float:
    """Return rows per second: the median of five windows, after a warm-up."""
    for _ in range(3):
        forward(ids)
    rates = []
    for _ in range(5):
        started, rows = time.perf_counter(), 0
        while not rows or time.perf_counter() - started < seconds / 5:
            forward(ids)
            rows += len(ids)
        rates.append(rows / (time.perf_counter() - started))
    return statistics.median(rates)


def draw(figures: dict[str, dict[int, float]], folder: Path, title: str) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = list(next(iter(figures.values())))

    def draw_lines(name: str, heading: str) -> Path:
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        for variant, rates in figures.items():
            axes.plot(batches, list(rates.values()), marker="o", label=variant)
        axes.set(xlabel="batch size", ylabel="rows a second", title=f"{heading}\n{title}")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(folder / name, dpi=150, bbox_inches="tight")
        pyplot.close(figure)
        return folder / name

    def draw_bars(name: str, heading: str, pairs: list[tuple[str, str]]) -> Path:
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        for shift, (fast, slow) in zip((-0.2, 0.2), pairs):
            ratios = [figures[fast][batch] / figures[slow][batch] for batch in batches]
            axes.bar(
                [position + shift for position in range(len(batches))],
                ratios,
                0.4,
                label=f"{fast} over {slow}",
            )
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xlabel="batch size", ylabel="times as fast", title=f"{heading}\n{title}")
        axes.set_xticks(range(len(batches)), list(map(str, batches)))
        axes.legend()
        figure.savefig(folder / name, dpi=150, bbox_inches="tight")
        pyplot.close(figure)
        return folder / name

    engines = [(f"{ONNX} {number}", f"{TORCH} {number}") for number in ("fp32", "fp16")]
    formats = [(f"{engine} fp16", f"{engine} fp32") for engine in (TORCH, ONNX)]
    return [
        draw_lines("throughput_by_batch_size.png", "Throughput by batch size"),
        draw_bars("onnx_against_pytorch.png", "ONNX Runtime against PyTorch", engines),
        draw_bars("fp16_against_fp32.png", "fp16 against fp32", formats),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--model", type=Path, help="folder of a trained model, as save_pretrained writes it")
    parser.add_argument("--layers", type=int, default=12, help="of a model with random weights")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--folder", type=Path, default=Path("figures"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("No GPU is here that torch can use; --device cpu measures on the CPU.")
    device, batches = options.device, [int(batch) for batch in options.batches.split(",")]
    device_name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    if options.model and not (options.model / "config.json").is_file():
        raise SystemExit(f"{options.model} has no config.json; examples/10_ner/train.py makes such a folder.")
    model = load_network(options.model) if options.model else build_network(options.layers, options.hidden)
    options.folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict[int, float]] = {}
    ids = draw_ids(model, 64, options.length)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "ner.onnx"
        print("exporting to ONNX ...", flush=True)
        export(model, options.length, file)
        expected = torch_forward(model, "cpu", False)(ids)
        variants = {
            f"{TORCH} fp32": lambda: torch_forward(model, device, False),
            f"{TORCH} fp16": lambda: torch_forward(model, device, True),
            f"{ONNX} fp32": lambda: onnx_forward(file, device, False),
            f"{ONNX} fp16": lambda: onnx_forward(file, device, True),
        }
        for name, create in variants.items():
            forward = create()
            logits = forward(ids)
            difference = float(np.abs(logits - expected).max())
            equal = float((logits.argmax(-1) == expected.argmax(-1)).mean())
            figures[name] = {
                batch: throughput(forward, draw_ids(model, batch, options.length), options.seconds)
                for batch in batches
            }
            summary = "  ".join(f"{batch}: {rate:,.0f}/s" for batch, rate in figures[name].items())
            compared = f"logits differ by {difference:.1e} at most, {equal:.2%} of the labels are equal"
            print(f"{name:<18} {summary}   ({compared})", flush=True)
    network = options.model.name if options.model else f"{options.layers} layers of {options.hidden}"
    title = f"NER, {network}, {options.length} tokens, {device_name}"
    (options.folder / "throughput.json").write_text(
        json.dumps({"about": title, "rows_per_second": figures}, indent=2)
    )
    for image in draw(figures, options.folder, title):
        print(f"drawn: {image}")


if __name__ == "__main__":
    main()
