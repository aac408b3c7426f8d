"""The base class of handlers of text: a vocabulary, and the steps that clean a text."""

from __future__ import annotations

import functools
import os
import re
import string
import unicodedata
from pathlib import Path
from typing import Any

import torch

from handlers.base import BaseHandler
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain import attributions as explanations
from handlers.torchserve_compat import contractions, tokens, vocabulary

CLEANUP_REGEX = re.compile(r"<.*?>|&(?:[a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")  # tags and entities of HTML
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class TextHandler(BaseHandler):
    """A handler that loads the model and ``source_vocab.pt``, which every archive of text contains.

    See handlers.torchserve_compat.vocabulary.
    """

    input_type = "text/plain"

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None
        self.tokenizer = tokens.get_tokenizer("basic_english")
        self.input_text: Any = None

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        self.initialized = False
        trusted = self.model_yaml_config.get("trusted") is True
        self.source_vocab = vocabulary.load(Path(self.get_source_vocab_path(context)), trusted)
        self.initialized = True

    def get_source_vocab_path(self, ctx: Any) -> str:
        """Return the path of the vocabulary: ``sourceVocab`` of the manifest, else ``source_vocab.pt``."""
        file_name = ((ctx.manifest or {}).get("model") or {}).get("sourceVocab") or "source_vocab.pt"
        path = os.path.join(ctx.system_properties.get("model_dir"), file_name)
        if not os.path.isfile(path):
            raise HandlerLoadError(
                f"{path}: the archive has no vocabulary, which a handler of text needs. Save a dict of token "
                "to index "
                f"there with torch.save, and archive it with --extra-files {os.path.basename(file_name)}."
            )
        return path

    def get_text(self, row: Any) -> str:
        """Return the text in a row, as ``data`` or as the body.

        Raises PredictionException (400) if there is none.
        """
        text = (row.get("data") or row.get("body")) if isinstance(row, dict) else row
        if isinstance(text, (bytes, bytearray)):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise PredictionException(f"The input is not text in UTF-8: {error}", 400) from error
        if not isinstance(text, str):
            raise PredictionException(
                "There is no text: send it as the body, or as the form field data.", 400
            )
        return text

    @functools.cached_property
    def lig(self) -> Any:
        """Captum's LayerIntegratedGradients of the model's layer ``embedding``."""
        embedding = getattr(self.model, "embedding", None)
        if embedding is None:
            raise PredictionException("The model cannot be explained: it has no layer named embedding.", 501)
        return explanations.layer_integrated_gradients(self.model, embedding)

    def _expand_contractions(self, text: str) -> str:
        return contractions.expand(text)

    def _remove_accented_characters(self, text: str) -> str:
        """Return plain ASCII: accents of letters are removed, and other characters are dropped."""
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()

    def _remove_html_tags(self, text: str) -> str:
        return CLEANUP_REGEX.sub("", text)

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(_NO_PUNCTUATION)

    _remove_puncutation = _remove_punctuation  # the spelling of older handlers

    def _tokenize(self, text: str) -> list[str]:
        return self.tokenizer(text)

    def get_word_token(self, input_tokens: list[str]) -> list[str]:
        """Return the tokens without the mark that byte-pair encodings use for a space."""
        return [token.replace("\u0120", "") for token in input_tokens]

    def summarize_attributions(self, attributions: torch.Tensor) -> torch.Tensor:
        """Return the softmax of each row of ``attributions``, over the norm of the rows' sums."""
        attributions = torch.softmax(attributions, dim=0 if attributions.dim() in (0, 1, 3) else 1)
        return attributions / torch.norm(attributions.sum(dim=-1))
