"""Sharded models: the process group of ranks, tensor and pipeline parallelism, and placement on devices."""
