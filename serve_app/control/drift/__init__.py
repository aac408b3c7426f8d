"""The drift of captured requests from a reference."""
