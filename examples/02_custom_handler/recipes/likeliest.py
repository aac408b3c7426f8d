"""A built-in handler with another setting."""

from handlers.builtin.image_classifier import ImageClassifier


class Likeliest(ImageClassifier):
    topk = 1
