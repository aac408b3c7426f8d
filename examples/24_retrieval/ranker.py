"""Scores how well a passage answers a question, token by token.

The score is the mean over the question's tokens of the largest cosine with a token of the passage (late
interaction: Khattab and Zaharia, ColBERT, 2020).
"""

import torch
from transformers import AutoModel, AutoTokenizer


class Ranker:
    def initialize(self, context):
        self.folder = context.system_properties["model_dir"]
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.model = AutoModel.from_pretrained(self.folder).eval()

    def handle(self, data, context):
        pairs = [row["body"] for row in data]
        questions, is_question = self.embed([pair["text"] for pair in pairs])
        passages, is_passage = self.embed([pair["text_pair"] for pair in pairs])
        cosines = torch.einsum("bqd,bpd->bqp", questions, passages)
        best = cosines.masked_fill(~is_passage[:, None], -1).amax(2) * is_question
        for idx in range(len(pairs)):
            context.set_response_content_type(idx, "application/json")
        return (best.sum(1) / is_question.sum(1)).tolist()

    @torch.inference_mode()
    def embed(self, texts):
        """Return a vector of length 1 for each token, and which of them are tokens of the text."""
        batch = self.tokenizer(
            texts,
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=160,
            return_special_tokens_mask=True,
        )
        special = batch.pop("special_tokens_mask")
        vectors = torch.nn.functional.normalize(self.model(**batch).last_hidden_state, dim=2)
        return vectors, batch["attention_mask"].bool() & ~special.bool()
