"""Attention for continuous batching on a CPU, computed per row.

transformers concatenates the queries and the keys of all rows of a step and masks pairs of different rows.
Sixteen rows then cost sixteen times the necessary work; a GPU has kernels that avoid it. Here decode rows
(one new token) are batched, with keys padded to the longest row. Prefill rows (several tokens) run one by
one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "rows"
_REPLACED_IMPLEMENTATION = "sdpa"
_MAX_PADDING_RATIO = 1.3  # a group's longest row has at most this many times the keys of its shortest


def enable(model: Any) -> None:
    """Switch a ``model`` on a CPU to per-row attention if all its layers use full attention."""
    from transformers import AttentionInterface
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    config = model.config.get_text_config()
    masked = model.device.type == "cpu" and config._attn_implementation == _REPLACED_IMPLEMENTATION
    if masked and set(group_layers_by_attn_type(config)) == {"full_attention"}:
        AttentionInterface.register(NAME, attend)
        model.set_attn_implementation(NAME)


def disable(model: Any) -> None:
    """Restore the attention implementation that ``enable`` replaced."""
    if model.config.get_text_config()._attn_implementation == NAME:
        model.set_attn_implementation(_REPLACED_IMPLEMENTATION)


@dataclass
class _DecodeAttention:
    """A group of rows with one token each."""

    rows: torch.Tensor | None  # indices of their queries; None: all queries of the step, in order
    count: int
    start: int  # offset of their first key
    max_length: int
    bias: torch.Tensor | None


@dataclass
class _PrefillAttention:
    """A row with several tokens, or one without cached keys."""

    queries: slice
    keys: slice
    bias: torch.Tensor | None  # None: queries and keys are of the same tokens


class _AttentionStep:
    """The layout of one step's rows, which all layers share."""

    def __init__(
        self,
        source: list[torch.Tensor],
        query_offsets: list[int],
        key_offsets: list[int],
        dtype: torch.dtype,
    ) -> None:
        """``query_offsets`` and ``key_offsets`` hold each row's first position and the last row's end."""
        self.source = source
        self.decodes: list[_DecodeAttention] = []
        self.prefills: list[_PrefillAttention] = []
        self.index = source
        [self._read_index] = source
        self._query_offsets = query_offsets
        self._key_offsets = key_offsets
        self._dtype = dtype
        self._parts: list[torch.Tensor] = []
        self._key_count = 0
        rows = range(len(query_offsets) - 1)
        if not self._read_index.numel():  # without cached keys, the keys are those of the queries
            slices = [slice(*query_offsets[i : i + 2]) for i in rows]
            self.prefills = [_PrefillAttention(tokens, tokens, None) for tokens in slices]
            return
        self._lengths = [key_offsets[i + 1] - key_offsets[i] for i in rows]
        self._group_decodes([i for i in rows if query_offsets[i + 1] - query_offsets[i] == 1])
        for i in rows:
            if query_offsets[i + 1] - query_offsets[i] > 1:
                self._add_prefill(i)
        self.index = [torch.cat(self._parts)]

    def _group_decodes(self, rows: list[int]) -> None:
        """Group rows of similar length, at most ``_MAX_PADDING_RATIO`` apart."""
        rows = sorted(rows, key=self._lengths.__getitem__)
        while rows:
            min_length = self._lengths[rows[0]]
            group = [i for i in rows if self._lengths[i] <= _MAX_PADDING_RATIO * min_length]
            rows = rows[len(group) :]
            self._add_decodes(sorted(group))

    def _add_decodes(self, group: list[int]) -> None:
        max_length = max(self._lengths[i] for i in group)
        starts = torch.tensor([[self._key_offsets[i]] for i in group])
        positions = torch.arange(max_length)
        padding = positions >= torch.tensor([[self._lengths[i]] for i in group])
        padded = (starts + positions).masked_fill_(padding, self._key_offsets[group[0]])
        self._parts.append(self._read_index[padded].flatten())
        bias = torch.zeros(padding.shape, dtype=self._dtype).masked_fill_(padding, float("-inf"))
        covers_step = len(group) == self._query_offsets[-1]
        rows = None if covers_step else torch.tensor([self._query_offsets[i] for i in group])
        decode = _DecodeAttention(rows, len(group), self._key_count, max_length, bias[:, None, None])
        self.decodes.append(decode)
        self._key_count += len(group) * max_length

    def _add_prefill(self, row: int) -> None:
        start, end = self._query_offsets[row : row + 2]
        length = self._lengths[row]
        self._parts.append(self._read_index[self._key_offsets[row] : self._key_offsets[row + 1]])
        cached = length - (end - start)
        bias = None
        if cached:
            future = torch.ones(end - start, length, dtype=torch.bool).triu_(cached + 1)
            bias = torch.zeros(future.shape, dtype=self._dtype).masked_fill_(future, float("-inf"))
        keys = slice(self._key_count, self._key_count + length)
        self.prefills.append(_PrefillAttention(slice(start, end), keys, bias))
        self._key_count += length


_thread_state = threading.local()  # the current step of this thread's engine


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cache: Any = None,
    scaling: float | None = None,
    **step_args: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention: (1, heads, tokens, width) to (1, tokens, heads, width).

    transformers calls it with the engine's ``cache``; ``step_args`` describe the rows (PagedAttentionArgs).
    Without a cache, the forward pass is not the engine's and has a mask.
    """
    if cache is None:
        attended = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.transpose(1, 2).contiguous(), None
    step: _AttentionStep | None = getattr(_thread_state, "step", None)
    if step is None or step.source is not step_args["read_index"]:
        [key_offsets] = step_args["cu_seq_lens_k"].values()
        step = _thread_state.step = _AttentionStep(
            step_args["read_index"], step_args["cu_seq_lens_q"].tolist(), key_offsets.tolist(), query.dtype
        )
    step_args["read_index"] = step.index
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=step_args
    )
    heads, groups = query.shape[1], key.shape[1]
    output = query.new_empty(query.shape[2], heads, value.shape[-1])
    for decode in step.decodes:
        selected = query[0] if decode.rows is None else query[0].index_select(1, decode.rows)
        attended = scaled_dot_product_attention(
            selected.transpose(0, 1).reshape(decode.count, groups, heads // groups, -1),
            _split_rows(key, decode),
            _split_rows(value, decode),
            attn_mask=decode.bias,
            scale=scaling,
        ).reshape(decode.count, heads, -1)
        if decode.rows is None:
            output = attended
        else:
            output[decode.rows] = attended
    for prefill in step.prefills:
        attended = scaled_dot_product_attention(
            query[:, :, prefill.queries],
            key[:, :, prefill.keys],
            value[:, :, prefill.keys],
            attn_mask=prefill.bias,
            is_causal=prefill.bias is None,
            scale=scaling,
            enable_gqa=heads != groups,
        )
        output[prefill.queries] = attended[0].transpose(0, 1)
    return output.unsqueeze(0), None


def _split_rows(states: torch.Tensor, decode: _DecodeAttention) -> torch.Tensor:
    """Reshape (1, heads, tokens, width) to (rows, heads, max_length, width)."""
    part = states[0, :, decode.start : decode.start + decode.count * decode.max_length]
    return part.unflatten(1, (decode.count, decode.max_length)).transpose(0, 1)
