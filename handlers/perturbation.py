"""What an input's parts have to do with an output, found by taking them away: for models without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

METHODS = ("occlusion", "feature_ablation", "shapley")
_CELLS = 256  # the parts that a row is cut into, at most: each is one call of the model or more


def attributions(
    captum: Any,
    method: str,
    forward: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    baseline: Any,
    target: Any,
    permutations: int,
    at_once: int,
) -> torch.Tensor:
    """By ``captum.attr``: an attribution for each number of ``inputs`` (rows first), shaped as they are.

    A row is cut into cells: a number each, or where there are more than 256 equal stretches or tiles, all
    channels together. What a cell has to do with it is shared out to its numbers equally. Occlusion's windows
    are two cells wide and go on by one. ``at_once`` rows go into ``forward`` together, as near as can be.
    """
    shape = inputs.shape[1:]
    arguments = {
        "baselines": baseline,
        "target": target,
        "perturbations_per_eval": max(1, at_once // len(inputs)),
    }
    if method == "occlusion":
        whole, strides = [*shape], [*shape]
        for dimension in _cut(shape):
            strides[dimension] = _side(shape, dimension)
            whole[dimension] = min(shape[dimension], 2 * strides[dimension])
        found = captum.Occlusion(forward).attribute(
            inputs, sliding_window_shapes=tuple(whole), strides=tuple(strides), **arguments
        )
        return found / math.prod(whole)
    mask = cells(shape).to(inputs.device)
    sizes = torch.bincount(mask.flatten())[mask]
    if method == "feature_ablation":
        return captum.FeatureAblation(forward).attribute(inputs, feature_mask=mask, **arguments) / sizes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same question has the same answer
        found = captum.ShapleyValueSampling(forward).attribute(
            inputs, feature_mask=mask, n_samples=permutations, **arguments
        )
    return found / sizes


def cells(shape: Sequence[int]) -> torch.Tensor:
    """The number of the cell that each place of a row belongs to: 1 x ``shape``, from 0 without gaps."""
    number = torch.zeros((1, *[1] * len(shape)), dtype=torch.long)
    for dimension in _cut(shape):
        place = torch.arange(shape[dimension]) // _side(shape, dimension)
        along = [1] * (len(shape) + 1)
        along[dimension + 1] = -1
        number = number * (int(place[-1]) + 1) + place.view(along)
    return number.expand(1, *shape).contiguous()


def _cut(shape: Sequence[int]) -> range:
    """The dimensions that are cut: not the channels, which come first where there are three or more."""
    return range(len(shape) > 2, len(shape))


def _side(shape: Sequence[int], dimension: int) -> int:
    """A cell's length along ``dimension``."""
    most = max(1, round(_CELLS ** (1 / len(_cut(shape)))))
    return math.ceil(shape[dimension] / most)
