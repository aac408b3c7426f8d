"""Captured requests and responses: their files, features and upload."""
