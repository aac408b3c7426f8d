"""The Open Inference Protocol, version 2."""
