"""The echo and the mlp, written for the other frameworks as their documentation writes a model."""
