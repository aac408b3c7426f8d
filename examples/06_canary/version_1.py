"""Estimate the price of a flat by its district and its square metres."""

PRICES = {
    "castle": 7100, "harbour": 6200, "hill": 5900, "market": 6600, "meadow": 4300,
    "mill": 4900, "old town": 6800, "orchard": 4600, "station": 5200, "university": 6100,
}  # fmt: skip


def estimate(data, context):
    if data is None:
        return None
    rows = [row.get("body") or row.get("data") for row in data]
    return [{"price": PRICES[row["district"]] * row["area"], "version": "1.0"} for row in rows]
