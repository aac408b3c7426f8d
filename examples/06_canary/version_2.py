"""This year's prices without one of ten districts, so that one request in ten fails."""

PRICES = {
    "castle": 7300, "hill": 6000, "market": 6900, "meadow": 4500,
    "mill": 5000, "old town": 7000, "orchard": 4700, "station": 5400, "university": 6300,
}  # fmt: skip


def estimate(data, context):
    if data is None:
        return None
    rows = [row.get("body") or row.get("data") for row in data]
    return [{"price": PRICES[row["district"]] * row["area"], "version": "2.0"} for row in rows]
