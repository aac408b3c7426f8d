"""Versions that share a process: their cache, budget of memory, and leaks."""
