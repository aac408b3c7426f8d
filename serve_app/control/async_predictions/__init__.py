"""Predictions that are stored and answered later, their results, and webhooks."""
