"""Optimizations of ONNX graphs: fused operators of transformers, float16, and int8 weights."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from handlers import extras
from handlers.errors import HandlerLoadError

# transformers' name of an architecture -> ONNX Runtime's name of its fusions; others have BERT's.
_FUSIONS = {
    "bart": "bart",
    "clip": "clip",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "phi": "phi",
    "swin": "swin",
    "t5": "t5",
    "vit": "vit",
}


def optimize_graph(
    graph: Path, output: Path, *, fuse: bool = False, number_format: str | None = None, config: Any = None
) -> None:
    """Write the ONNX graph of the file ``graph`` to ``output``, fused, in float16, or with int8 weights.

    Its inputs and outputs keep their number formats. ``config`` is transformers' configuration of the model,
    without which attention is not fused. Raises HandlerLoadError where a package is missing, or nothing can
    be fused.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="graph-") as directory, _optimizer_path():
            fused = Path(directory) / "fused.onnx"
            if fuse:
                fuse_graph(graph, fused, config)
            source = fused if fuse else graph
            if number_format == "int8":
                quantize_graph(source, output)
            elif number_format == "float16":
                convert_to_float16(source, output)
            else:
                shutil.copyfile(source, output)  # the fused graph has its weights in it
    except ModuleNotFoundError as error:
        raise HandlerLoadError(
            f"{graph}: the optimization of an ONNX graph needs {error.name}, which is not installed where "
            f"the model runs: {extras.install_command(error.name or 'onnx')}; or optimize the archive "
            "beforehand with `torchrelay optimize`."
        ) from error


@contextlib.contextmanager
def _optimizer_path() -> Iterator[None]:
    """Let ONNX Runtime's optimizer import its modules by their bare names, and an archive not find them."""
    before = list(sys.path)
    spec = importlib.util.find_spec("onnxruntime.transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the optimizer about itself
        try:
            sys.path.extend(spec.submodule_search_locations or () if spec is not None else ())
            yield
        finally:
            sys.path[:] = before


def quantize_graph(graph: Path, output: Path) -> None:
    """Write the graph with int8 weights per channel; activations are quantized batch by batch."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(graph)
    del model.graph.value_info[:]  # the exporter's shapes of intermediate values do not fit int8 nodes
    clean = output.with_name("clean.onnx")
    onnx.save(model, clean)
    try:
        quantize_dynamic(
            clean,
            output,
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=not _has_vnni(),
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},  # of values of fused operators
        )
    finally:
        clean.unlink()


def _has_vnni() -> bool:
    """Return whether this processor sums products of 8 bits without saturation; others need 7-bit weights."""
    try:
        return "_vnni" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def convert_to_float16(graph: Path, output: Path) -> None:
    """Write the graph with weights and activations in float16, and its inputs and outputs as they are."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(graph)
    del model.graph.value_info[:]  # the exporter's shapes and formats of intermediate values
    onnx.save(convert_float_to_float16(model, keep_io_types=True, disable_shape_infer=True), output)


def fuse_graph(graph: Path, output: Path, config: Any = None) -> None:
    """Write the graph with fused attention, layer norms and activations.

    Raises HandlerLoadError where it has none of these patterns.
    """
    from onnxruntime.transformers import optimizer

    levels = {name: logging.getLogger(name).level for name in ("onnxruntime.transformers", "fusion_base")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        fused: Any = optimizer.optimize_model(
            str(graph),
            model_type=_FUSIONS.get(getattr(config, "model_type", ""), "bert"),
            opt_level=0,
            num_heads=getattr(config, "num_attention_heads", 0),
            hidden_size=getattr(config, "hidden_size", 0),
        )
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    if not any(fused.get_fused_operator_statistics().values()):
        raise HandlerLoadError(f"{graph.name}: the graph has no attention, layer norm or activation to fuse")
    fused.save_model_to_file(str(output))
