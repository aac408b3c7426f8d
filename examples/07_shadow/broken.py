from handler import Reader


class NewFormatReader(Reader):
    """A reader that requires {"pixels": [...]}, which no client sends yet."""

    def preprocess(self, data):
        return super().preprocess([{"body": row["body"]["pixels"]} for row in data])
