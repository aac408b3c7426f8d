"""Attention of continuous batching on a CPU: each row with its own keys and values.

transformers lays the queries of a step's rows end to end, and all their keys, and masks whatever is of two rows:
sixteen rows cost sixteen times what they need. A GPU has kernels for that. Here rows that want one more token go
together, their keys padded to the longest row's, and one that brings several tokens (a prompt, or a piece of it) goes
alone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "rows"
_OF = "sdpa"  # what it stands in for
_PADDED = 1.3  # rows go together whose keys are at most so many times as many as those of the shortest of them


def use(model: Any) -> None:
    """Let the ``model``, which is on a CPU, attend by rows where all its layers see all tokens."""
    from transformers import AttentionInterface
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    config = model.config.get_text_config()
    masked = model.device.type == "cpu" and config._attn_implementation == _OF
    if masked and set(group_layers_by_attn_type(config)) == {"full_attention"}:
        AttentionInterface.register(NAME, attend)
        model.set_attn_implementation(NAME)


def leave(model: Any) -> None:
    """Let the model attend as before ``use``."""
    if model.config.get_text_config()._attn_implementation == NAME:
        model.set_attn_implementation(_OF)


@dataclass
class _Together:
    """Rows with a token each."""

    rows: torch.Tensor | None  # where their queries stand; None: all of the step's, in order
    count: int
    at: int  # where their keys begin
    longest: int
    bias: torch.Tensor | None


@dataclass
class _Alone:
    """A row with several tokens, or whose keys are none but its own."""

    queries: slice
    keys: slice
    bias: torch.Tensor | None  # None: the queries are of the same tokens as the keys


class _Step:
    """How the rows of one step lie, the same for all layers."""

    def __init__(self, source: list[torch.Tensor], queries: list[int], keys: list[int], dtype: torch.dtype) -> None:
        """``queries`` and ``keys`` are where each row's begin, and where the last one's end."""
        self.source = source
        self.together: list[_Together] = []
        self.alone: list[_Alone] = []
        [read] = source
        self.index = source
        rows = range(len(queries) - 1)
        if not read.numel():  # nothing is read from the cache: keys are those of the queries
            self.alone = [_Alone(slice(*queries[i : i + 2]), slice(*queries[i : i + 2]), None) for i in rows]
            return
        length = [keys[i + 1] - keys[i] for i in rows]
        single = sorted((i for i in rows if queries[i + 1] - queries[i] == 1), key=length.__getitem__)
        parts: list[torch.Tensor] = []
        at = 0
        while single:
            shortest = length[single[0]]
            group = [i for i in single if length[i] <= _PADDED * shortest]
            single = single[len(group) :]
            group.sort()
            longest = max(length[i] for i in group)
            begins = torch.tensor([[keys[i]] for i in group])
            steps = torch.arange(longest)
            missing = steps >= torch.tensor([[length[i]] for i in group])
            parts.append(read[(begins + steps).masked_fill_(missing, keys[group[0]])].flatten())
            bias = torch.zeros(missing.shape, dtype=dtype).masked_fill_(missing, float("-inf"))[:, None, None]
            everybody = len(group) == queries[-1]
            where = None if everybody else torch.tensor([queries[i] for i in group])
            self.together.append(_Together(where, len(group), at, longest, bias))
            at += len(group) * longest
        for i in rows:
            begin, end = queries[i : i + 2]
            if end - begin > 1:
                parts.append(read[keys[i] : keys[i + 1]])
                before = length[i] - (end - begin)
                later = torch.ones(end - begin, length[i], dtype=torch.bool).triu_(before + 1)
                bias = torch.zeros(later.shape, dtype=dtype).masked_fill_(later, float("-inf")) if before else None
                self.alone.append(_Alone(slice(begin, end), slice(at, at + length[i]), bias))
                at += length[i]
        self.index = [torch.cat(parts)]


_last = threading.local()  # the step of this thread's engine


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cache: Any,
    scaling: float | None = None,
    **step: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for a layer: (1, heads, tokens, width) to (1, tokens, heads, width).

    ``cache`` is the engine's; ``step`` says what each row has (PagedAttentionArgs).
    """
    how: _Step | None = getattr(_last, "step", None)
    if how is None or how.source is not step["read_index"]:
        [keys] = step["cu_seq_lens_k"].values()
        how = _last.step = _Step(step["read_index"], step["cu_seq_lens_q"].tolist(), keys.tolist(), query.dtype)
    step["read_index"] = how.index
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=step)
    heads, groups = query.shape[1], key.shape[1]
    out = query.new_empty(query.shape[2], heads, value.shape[-1])
    for some in how.together:
        asked = query[0].transpose(0, 1) if some.rows is None else query[0].index_select(1, some.rows).transpose(0, 1)
        said = scaled_dot_product_attention(
            asked.reshape(some.count, groups, heads // groups, -1),
            _rows(key, some),
            _rows(value, some),
            attn_mask=some.bias,
            scale=scaling,
        ).reshape(some.count, heads, -1)
        if some.rows is None:
            out = said
        else:
            out[some.rows] = said
    for one in how.alone:
        said = scaled_dot_product_attention(
            query[:, :, one.queries],
            key[:, :, one.keys],
            value[:, :, one.keys],
            attn_mask=one.bias,
            is_causal=one.bias is None,
            scale=scaling,
            enable_gqa=heads != groups,
        )
        out[one.queries] = said[0].transpose(0, 1)
    return out.unsqueeze(0), None


def _rows(states: torch.Tensor, some: _Together) -> torch.Tensor:
    """(1, heads, tokens, width) as (rows, heads, longest, width)."""
    part = states[0, :, some.at : some.at + some.count * some.longest]
    return part.unflatten(1, (some.count, some.longest)).transpose(0, 1)
