"""The handlers that a manifest or a registration can name, such as ``image_classifier`` and ``llm``."""
