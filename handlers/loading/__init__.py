"""From a handler's name to a ``LoadedHandler``: modules, classes, weights and devices, from ``loader.py``."""
