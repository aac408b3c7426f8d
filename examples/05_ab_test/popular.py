"""Version 1.0: recommend the most popular topic to every reader."""

SHARES = (0.40, 0.25, 0.15, 0.10, 0.10)  # of the readers, by their favourite topic


def recommend(data, context):
    if data is None:  # called once, when the model is loaded
        return None
    return [{"topic": 0, "confidence": SHARES[0]} for _ in data]
