"""Torchrelay's server: models from TorchServe archives, served on Ray Serve."""

__version__ = "0.1.0"
