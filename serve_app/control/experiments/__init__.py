"""A/B tests: their start and end, and the analysis of their metrics by confidence sequences."""
