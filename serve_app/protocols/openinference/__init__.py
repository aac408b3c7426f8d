"""The Open Inference Protocol, version 2. README.md describes its routes and design decisions."""
