"""Attributions by perturbation of the input, for models without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

METHODS = ("occlusion", "feature_ablation", "shapley")
_MAX_CELLS = 256  # parts of a row; each costs at least one call of the model


def attribute(
    captum: Any,
    method: str,
    forward: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    baseline: Any,
    target: Any,
    permutations: int,
    batch_size: int,
) -> torch.Tensor:
    """Return ``captum.attr``'s attribution of each number of ``inputs`` (rows first), in the same shape.

    A cell of a row is one number, or beyond 256 numbers an equal stretch or a tile across all channels. A
    cell's attribution is divided equally among its numbers. Occlusion's windows are two cells wide and move
    by one. ``forward`` gets about ``batch_size`` rows at once.
    """
    shape = inputs.shape[1:]
    arguments = {
        "baselines": baseline,
        "target": target,
        "perturbations_per_eval": max(1, batch_size // len(inputs)),
    }
    if method == "occlusion":
        window, strides = [*shape], [*shape]
        for dimension in _split_dimensions(shape):
            strides[dimension] = _cell_length(shape, dimension)
            window[dimension] = min(shape[dimension], 2 * strides[dimension])
        values = captum.Occlusion(forward).attribute(
            inputs, sliding_window_shapes=tuple(window), strides=tuple(strides), **arguments
        )
        return values / math.prod(window)
    mask = cell_indices(shape).to(inputs.device)
    sizes = torch.bincount(mask.flatten())[mask]
    if method == "feature_ablation":
        return captum.FeatureAblation(forward).attribute(inputs, feature_mask=mask, **arguments) / sizes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # equal requests get equal explanations
        values = captum.ShapleyValueSampling(forward).attribute(
            inputs, feature_mask=mask, n_samples=permutations, **arguments
        )
    return values / sizes


def cell_indices(shape: Sequence[int]) -> torch.Tensor:
    """Return the index of each position's cell: 1 x ``shape``, from 0 without gaps."""
    indices = torch.zeros((1, *[1] * len(shape)), dtype=torch.long)
    for dimension in _split_dimensions(shape):
        along = torch.arange(shape[dimension]) // _cell_length(shape, dimension)
        view = [1] * (len(shape) + 1)
        view[dimension + 1] = -1
        indices = indices * (int(along[-1]) + 1) + along.view(view)
    return indices.expand(1, *shape).contiguous()


def _split_dimensions(shape: Sequence[int]) -> range:
    """Return the dimensions to split: all but the channels, the first of three or more dimensions."""
    return range(len(shape) > 2, len(shape))


def _cell_length(shape: Sequence[int], dimension: int) -> int:
    """Return a cell's length along ``dimension``."""
    max_cells = max(1, round(_MAX_CELLS ** (1 / len(_split_dimensions(shape)))))
    return math.ceil(shape[dimension] / max_cells)
