"""Shadow traffic: copies of requests to a second version, whose responses are compared and discarded."""
