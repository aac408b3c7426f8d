"""The search for the configuration of a model with the highest goodput under a latency limit."""
