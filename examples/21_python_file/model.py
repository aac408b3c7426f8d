import re
from collections import Counter

from pydantic import BaseModel, Field

EXAMPLES = [
    ("spam", "win a free prize now, claim your prize"),
    ("spam", "free money, click now to win"),
    ("ham", "the meeting is moved to Monday, see you there"),
    ("ham", "please review the report before the meeting"),
]


class Mail(BaseModel):
    text: str = Field(examples=["claim your free prize"])


class Answer(BaseModel):
    label: str
    probability: float


class Model:
    torchrelay_keep = ("words",)

    def setup(self, context):
        self.words = {"spam": Counter(), "ham": Counter()}
        for label, text in EXAMPLES:
            self.words[label].update(re.findall(r"\w+", text.lower()))

    def predict(self, request: Mail) -> Answer:
        scores = {label: self.score(request.text, counts) for label, counts in self.words.items()}
        label = max(scores, key=scores.__getitem__)
        return Answer(label=label, probability=round(scores[label] / sum(scores.values()), 3))

    def score(self, text: str, counts: Counter) -> float:
        score, total = 1.0, counts.total()
        for word in re.findall(r"\w+", text.lower()):
            score *= (counts[word] + 1) / (total + 20)
        return score
