"""Prefix caching: a prompt reuses the keys and values of an earlier prompt with the same beginning.

transformers hashes each complete page of tokens together with all pages before it, shares equal pages
between requests, and keeps those of ended requests. This module adds namespaces, the number of tokens found,
and eviction by last use: transformers drops every unused page once less than 15 % of the cache is free. Its
hashes have 64 bits, too few for the prompts of clients that do not trust each other; these have 128.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache

_DIGEST_SIZE = 16  # bytes

# Receives a request's id and how many of its prompt's tokens were in the cache.
OnLookup = Callable[[str, int], None]


def install(manager: Any, on_lookup: OnLookup) -> None:
    """Extend the cache that ``manager`` creates in its thread before the first request.

    A model with sliding windows shares no pages: its cache stays as it is, and ``on_lookup`` is not called.
    """
    create = manager._create_batch_processor

    def create_extended() -> Any:
        processor = create()
        if processor.cache.use_prefix_sharing:
            processor.cache.__class__ = PrefixCache
            processor.cache.start(processor.scheduler, on_lookup)
        return processor

    manager._create_batch_processor = create_extended


class PrefixCache(PagedAttentionCache):
    """transformers' cache for models whose layers all use full attention.

    Pages that no request uses count as free: the least recently used ones are evicted when a request needs
    them. Blocks, in transformers' terms, are pages of all layers.
    """

    def start(self, scheduler: Any, on_lookup: OnLookup) -> None:
        self._scheduler = weakref.proxy(scheduler)  # it refers to the cache
        self._on_lookup = on_lookup
        [self._allocator] = self.cache_allocators.values()
        self._blocks = vars(self._allocator)["ledger"]  # transformers' name of its index of blocks

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Share the cached blocks of the prompt's prefix with the request, and return its length.

        The last token is never part of it, because its logits are needed.
        """
        state = self._scheduler.waiting_requests[request_id]
        allocator, found = self._allocator, []
        hashes = iterate_hashes(_namespace(state), prompt_ids, allocator.tokens_per_page)
        for digest in islice(hashes, (len(prompt_ids) - 1) // allocator.tokens_per_page):
            block = self._blocks.hash_to_block.get(digest)
            if block is None:
                break
            found.append(block)
        length = len(found) * allocator.tokens_per_page
        if found:
            allocator.acquire_prefix_blocks(request_id, length, found)
        if not state._true_initial_tokens:  # else it was preempted, and its prompt includes generated tokens
            self._on_lookup(request_id, length)
        return length

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Register the blocks that the last step has completed, also those of a request that has ended."""
        allocator = self._allocator
        table = allocator.block_table.get(state.request_id)
        count = sum(complete_blocks.values())  # there is one allocator
        if table is None or not count:
            return
        hashed, page = self._blocks.block_to_hash, allocator.tokens_per_page
        first = next((i for i, block in enumerate(table) if block not in hashed), len(table))
        parent = hashed[table[first - 1]] if first else _namespace(state)
        tokens = (state.initial_tokens + state.generated_tokens)[first * page : (first + count) * page]
        for place, digest in enumerate(iterate_hashes(parent, tokens, page), first):
            self._register(table, place, digest)

    def _register(self, table: list[int], place: int, digest: bytes) -> None:
        """Make a block available under its hash, or replace it by the one that already has this hash."""
        index, block = self._blocks, table[place]
        existing = index.register_new_hash(block, digest)
        if existing is not None:
            index.acquire(existing)
            table[place] = existing
            if index.release(block):
                self.pool.free_blocks(self._allocator.index, [block])

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Allocate blocks for the request, and evict as many unused ones as it needs."""
        allocator = self._allocator
        free = self.pool.count_free_blocks(allocator.index)
        free += self.pool.num_free_sectors * allocator.blocks_per_sector
        missing = allocator.needs_new_blocks(state.request_id, state.current_len(), request_len) - free
        if 0 < missing <= len(self._blocks.cached_blocks):
            self._evict(missing)
        return super().can_store_request_tokens(state, request_len, dry_run)

    def _evict(self, count: int) -> None:
        index = self._blocks
        blocks = list(islice(index.cached_blocks, count))  # the first to become unused first
        for block in blocks:
            del index.cached_blocks[block]
            del index.hash_to_block[index.block_to_hash.pop(block)]
        self.pool.free_blocks(self._allocator.index, blocks)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Free the request's blocks, the last first: without a prefix's beginning, its rest is not found."""
        self._allocator.block_table.get(request_id, []).reverse()
        super().free_blocks(request_id, no_cache)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """Return the free capacity with the unused blocks, in bytes or as a share of the whole."""
        unused = len(self._blocks.cached_blocks) * self._allocator.bytes_per_block
        if relative:
            return super().compute_free_capacity() + unused / (self.num_sectors * self.bytes_per_sector)
        return super().compute_free_capacity(relative=False) + unused


def iterate_hashes(parent: bytes, tokens: Sequence[int], page: int) -> Iterator[bytes]:
    """Yield the hash of each complete page of ``tokens``, which includes that of the page before it.

    ``parent`` is the hash before the first page. No process adds a salt of its own: ranks must agree.
    """
    for end in range(page, len(tokens) + 1, page):
        content = array("q", tokens[end - page : end]).tobytes()
        parent = blake2b(parent + content, digest_size=_DIGEST_SIZE).digest()
        yield parent


def _namespace(state: Any) -> bytes:
    """Return the hash before the first page of a request's prompt."""
    salt = state.logit_processor_kwargs.get("cache_salt", "")
    return blake2b(salt.encode(), digest_size=_DIGEST_SIZE).digest()
