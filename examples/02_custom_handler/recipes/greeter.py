"""A class that reads a key of its model-config.yaml."""


class Greeter:
    def initialize(self, context):  # once, when the replica starts
        self.greeting = context.model_yaml_config.get("greeting", "Hello")

    def handle(self, data, context):  # for each batch
        return [f"{self.greeting}, {row['body']}" for row in data]
