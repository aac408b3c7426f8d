"""Rollouts: steps, guardrails, and the decision to proceed or to roll back."""
