"""Version 2.0: every reader is shown the topic that their own history speaks for most (naive Bayes)."""

import time

import torch

SHARES = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.10])  # of the readers, by their favourite topic
FAITHFUL = 0.4  # how often somebody reads the favourite topic, and not what everybody reads


class Personal:
    def initialize(self, context):
        chances = FAITHFUL * torch.eye(len(SHARES)) + (1 - FAITHFUL) * SHARES  # [favourite, topic that is read]
        self.evidence = chances.log()

    def handle(self, data, context):
        histories = [torch.tensor(row["body"]["history"]) for row in data]
        counts = torch.stack([history.bincount(minlength=len(SHARES)) for history in histories]).float()
        belief = (SHARES.log() + counts @ self.evidence.T).softmax(dim=1)
        time.sleep(0.002)  # what a larger model would take
        confidences, topics = belief.max(dim=1)
        return [{"topic": t, "confidence": c} for t, c in zip(topics.tolist(), confidences.tolist(), strict=True)]
