"""Two rows of numbers in, their sum and their difference out: the model that the protocol's own examples ask."""


def add_and_subtract(data, context):
    """``data`` holds one dict of arrays for each request; so does what is returned."""
    return data and [
        {"OUTPUT0": row["INPUT0"] + row["INPUT1"], "OUTPUT1": row["INPUT0"] - row["INPUT1"]} for row in data
    ]
