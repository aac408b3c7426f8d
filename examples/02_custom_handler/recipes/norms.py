"""Rows of tensors, which are joined to one call."""

from handlers import tensor_batch


class Norms:
    def initialize(self, context):
        self.scale = 2.0

    def handle(self, data, context):
        return tensor_batch.run(data, self.norms)

    def norms(self, arrays):
        return {"norm": (arrays["x"] ** 2).sum(axis=1) ** 0.5 * self.scale}
