"""Pools, whose hosts load many versions: registration in them, observed state, and isolation."""
