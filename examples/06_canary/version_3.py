"""This year's prices of all districts."""

PRICES = {
    "castle": 7300, "harbour": 6400, "hill": 6000, "market": 6900, "meadow": 4500,
    "mill": 5000, "old town": 7000, "orchard": 4700, "station": 5400, "university": 6300,
}  # fmt: skip


def estimate(data, context):
    if data is None:
        return None
    rows = [row.get("body") or row.get("data") for row in data]
    return [{"price": PRICES[row["district"]] * row["area"], "version": "3.0"} for row in rows]
