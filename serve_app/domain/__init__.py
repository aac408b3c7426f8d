"""Frozen values that all layers share: requests, specs, the routing table and policies. No I/O."""
