"""Faster forms of a model: number formats, compilation, ONNX graphs, and the check of their outputs."""
