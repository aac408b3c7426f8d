"""Batchers: the queue of a version's rows, and the batches that its handler thread runs."""
