"""The modules that handlers of TorchServe archives import as ``ts.*``; ``names.py`` maps them."""
