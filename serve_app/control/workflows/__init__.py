"""Workflows: their registration, versions and functions."""
