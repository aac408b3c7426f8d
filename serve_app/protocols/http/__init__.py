"""The parts that HTTP protocols share: requests, routes, keys, bodies, errors and streams."""
