"""TorchServe's ``config.properties``: read as Java reads it, and what becomes of every key.

``read`` gives the ``args`` of an app.yaml and where the inference port listens. What a file does
not say has TorchServe's default, also where ours is another: the same file gives the same server.
``KEYS`` is the whole list; configs/README.md shows it.
"""

from serve_app.properties.keys import KEYS, Key, reference
from serve_app.properties.reading import Listener, Note, Reading, read
from serve_app.properties.syntax import Entry, decode, parse

__all__ = ["KEYS", "Entry", "Key", "Listener", "Note", "Reading", "decode", "parse", "read", "reference"]
