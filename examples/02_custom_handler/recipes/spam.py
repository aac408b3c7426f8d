"""A plain class: the annotations parse requests and results."""


class Model:
    def setup(self, context):  # once; optional, as its parameter
        self.words = {"win", "prize"}

    def predict(self, text: str) -> dict:  # for each request
        return {"spam": not self.words.isdisjoint(text.split())}
