"""Translation of TorchServe's ``config.properties``, parsed by javaproperties.

``read`` returns the ``args`` of an app.yaml and the address of the inference port. Missing keys have
TorchServe's defaults, also where Torchrelay's differ, so that the same file configures the same server.
``KEYS`` lists all keys, which keys.csv declares.
"""

from serve_app.torchserve_config.keys import KEYS, ConfigKey, reference
from serve_app.torchserve_config.parser import ConfigEntry, decode, parse
from serve_app.torchserve_config.translator import ListenAddress, TranslatedConfig, TranslationNote, read

__all__ = [
    "KEYS",
    "ConfigEntry",
    "ConfigKey",
    "ListenAddress",
    "TranslatedConfig",
    "TranslationNote",
    "decode",
    "parse",
    "read",
    "reference",
]
