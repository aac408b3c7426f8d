"""Beside the device: a model's handler, its thread, and the rows that wait for it. No Ray, no HTTP."""
