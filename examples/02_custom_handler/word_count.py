"""A function as a handler: it is called once without data when the model loads, then with every batch."""


def count_words(data, context):
    if data is None:
        return None  # load resources here
    texts = [row.get("data") or row.get("body") or "" for row in data]
    texts = [text if isinstance(text, str) else bytes(text).decode(errors="replace") for text in texts]
    return [{"words": len(text.split()), "characters": len(text)} for text in texts]
