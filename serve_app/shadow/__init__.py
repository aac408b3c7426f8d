"""Copies of calls to a version that nobody waits for, and how its answers agree with the live ones."""
