"""Torchrelay's server: models from TorchServe archives, served on Ray Serve."""

from serve_app._version import __version__

__all__ = ["__version__"]
