"""Explanations of predictions: attributions of a score to pixels or tokens, by Captum."""
