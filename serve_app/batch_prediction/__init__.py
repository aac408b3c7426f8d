"""Batch prediction: blocks of an input, their rows and results, without Ray."""
