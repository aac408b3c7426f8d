"""Version 2.0: recommend the topic that each reader's own history makes most probable (naive Bayes)."""

import time

import torch

SHARES = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.10])  # of the readers, by their favourite topic
LOYALTY = 0.4  # probability to read the favourite topic rather than a random one


class Personal:
    def initialize(self, context):
        # [favourite topic, topic of the article]
        probabilities = LOYALTY * torch.eye(len(SHARES)) + (1 - LOYALTY) * SHARES
        self.log_likelihoods = probabilities.log()

    def handle(self, data, context):
        histories = [torch.tensor(row["body"]["history"]) for row in data]
        counts = torch.stack([history.bincount(minlength=len(SHARES)) for history in histories]).float()
        posterior = (SHARES.log() + counts @ self.log_likelihoods.T).softmax(dim=1)
        time.sleep(0.002)  # the duration of a larger model
        confidences, topics = posterior.max(dim=1)
        return [
            {"topic": t, "confidence": c} for t, c in zip(topics.tolist(), confidences.tolist(), strict=True)
        ]
