"""Version 1.0: every reader is shown the topic that most people read."""

SHARES = (0.40, 0.25, 0.15, 0.10, 0.10)  # of the readers, by their favourite topic


def recommend(data, context):
    if data is None:  # once, when it is loaded
        return None
    return [{"topic": 0, "confidence": SHARES[0]} for _ in data]
