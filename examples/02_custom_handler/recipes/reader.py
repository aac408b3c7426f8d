"""Custom metrics."""

from handlers.metrics import Dimension, MetricTypes


class Reader:
    def initialize(self, context):
        self.length = context.metrics.add_metric_to_cache(
            "WordLength", "letters", ["Shelf"], MetricTypes.HISTOGRAM
        )

    def handle(self, data, context):
        for idx, row in enumerate(data):
            context.metrics.add_counter("WordsRead", 1, idx)
            context.metrics.add_counter("WordsOfAShelf", 1, idx, [Dimension("Shelf", "top")])
            self.length.add_or_update(len(row["body"]), ["top"], context.get_request_id(idx))
        return ["read"] * len(data)
