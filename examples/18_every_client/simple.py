"""The model of the protocol's own examples: the sum and the difference of two rows of numbers."""


def add_and_subtract(data, context):
    """Return a dict of arrays per request; ``data`` holds the dicts of the inputs."""
    return data and [
        {"OUTPUT0": row["INPUT0"] + row["INPUT1"], "OUTPUT1": row["INPUT0"] - row["INPUT1"]} for row in data
    ]
