"""Embeddings of texts: a vector per token, or one for the whole text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain import attributions
from handlers.explain.attributions import ExplanationOptions
from handlers.tasks.base import FLAG, TaskInput, parse_integer
from handlers.tasks.embedding_modules import SENTENCE, TOKENS, EmbeddingModules
from handlers.tasks.encoder import EncoderTask, read_json, with_count

SPARSE = "sparse_embedding"


class _EmbeddingTask(EncoderTask):
    """A task with a vector for each text, or for each of its tokens; explanations compare two texts.

    ``normalize`` scales each vector to the norm 1, by default those of texts only. With ``tokens: true`` the
    answer is ``{"embedding", "tokens"}`` with the number of tokens that the model read.
    """

    auto_class = "AutoModel"
    optional_weights = ("pooler.",)  # the hidden states do not depend on it
    parameters = {**EncoderTask.parameters, "normalize": FLAG}
    served_modules: ClassVar[tuple[str, ...]] = ("Transformer", "Pooling", "Dense", "Normalize")
    normalized_outputs: Collection[str] = (SENTENCE,)  # by default

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(directory, config, options, defaults)
        self._modules = self._read_modules()
        self._pooling_names = self._select_pooling()
        self._pools = [_POOLS[name] for name in self._pooling_names]

    def _read_modules(self) -> EmbeddingModules:
        return EmbeddingModules(self.directory, self.served_modules, self.options["trust_remote_code"])

    def _select_pooling(self) -> list[str]:
        """Return the names of the poolings of a text's vector. Raises HandlerLoadError."""
        folder = self._modules.find("Pooling") or self.directory / "1_Pooling"
        settings = read_json(folder / "config.json")
        if settings.get("include_prompt") is False:
            if self._default_prompt:
                raise HandlerLoadError(
                    f"{folder}: a default prompt together with include_prompt: false is not served; "
                    "take default_prompt_name out of config_sentence_transformers.json"
                )
            self._prompts = {}
        return _name_poolings(folder, settings)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "pooling": "+".join(self._pooling_names)}

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Pool the tokens' vectors of each text: rows x tokens x width, with a mask of rows x tokens x 1."""
        vectors = torch.cat([pool(hidden, mask) for pool in self._pools], dim=-1)
        for layer in self._modules.sentence_layers:
            vectors = layer(vectors)
        return vectors

    def get_token_vectors(self, output: Any) -> torch.Tensor:
        """Return the vector of each token: rows x tokens x width."""
        hidden: torch.Tensor = output.last_hidden_state.float()
        for layer in self._modules.token_layers:
            hidden = layer(hidden)
        return hidden

    def select_tokens(self, encoded: Any, examples: Sequence[TaskInput]) -> torch.Tensor:
        """Return which tokens have vectors in the answers: rows x tokens."""
        mask: torch.Tensor = encoded["attention_mask"].cpu().bool()
        return mask

    def postprocess(
        self, output: Any, encoded: Any, examples: Sequence[TaskInput]
    ) -> torch.Tensor | list[Any]:
        hidden, mask = self.get_token_vectors(output), encoded["attention_mask"]
        names = [self.get_output(example) for example in examples]
        own = unit = selected = hidden  # replaced where an output needs them
        if SENTENCE in names:
            own = self.pool(hidden, mask.unsqueeze(-1).to(hidden.dtype))
            unit = torch.nn.functional.normalize(own, dim=-1)
            if not any(example.parameters for example in examples):
                return unit
            own, unit = own.cpu(), unit.cpu()
        if TOKENS in names:
            hidden, selected = hidden.cpu(), self.select_tokens(encoded, examples)
        answers: list[Any] = []
        for index, (example, name) in enumerate(zip(examples, names)):
            normalize = example.parameters.get("normalize", name in self.normalized_outputs)
            if name == SENTENCE:
                vectors = (unit if normalize else own)[index]
            else:
                vectors = hidden[index][selected[index]]
                vectors = torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors
            answers.append(with_count(vectors.tolist(), example, mask[index]))
        return answers

    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        """Return the attribution of each token to the cosine similarity with another text, ``target``."""
        other = options.target
        if not isinstance(other, str) or not other.strip():
            raise PredictionException(
                f"The explanation of {'an embedding' if other is None else repr(other)[:100]} needs two "
                'texts: the one that is explained as "inputs" (of a form, data), and the one that it is '
                'compared with as "target".',
                400,
            )
        encoded = self.encode([example])

        def text_vectors(output: Any, inputs: Any) -> torch.Tensor:
            hidden = self.get_token_vectors(output)
            mask = inputs["attention_mask"].to(hidden.device, hidden.dtype).clone().unsqueeze(-1)
            return self.pool(hidden, mask.expand(len(hidden), -1, -1))

        with torch.inference_mode():
            compared = self.encode([TaskInput(*self.parse_value(other, {}), {})])
            other_vector = text_vectors(self.forward(model, compared, model.device), compared)
        with torch.inference_mode(False):
            vector = other_vector.clone()
        explanation = attributions.attribute_encoded(
            model,
            self.tokenizer,
            encoded,
            self.text_mask(encoded),
            options.for_target(0),
            lambda output: torch.cosine_similarity(text_vectors(output, encoded), vector),
        )
        return {"target": other, **explanation}


class FeatureExtraction(_EmbeddingTask):
    """A task that answers the vector of each token, as nested lists, or the pooled ``sentence_embedding``."""

    model_outputs = (TOKENS, SENTENCE)
    accepts_pairs = True
    served_modules = ("Transformer", "Pooling", "Normalize")
    _pooling_error = ""

    def _read_modules(self) -> EmbeddingModules:
        try:
            return super()._read_modules()
        except HandlerLoadError as error:  # the tokens' vectors need no modules
            self._pooling_error = str(error)
            return EmbeddingModules(self.directory / "none", ())

    def _select_pooling(self) -> list[str]:
        try:
            return super()._select_pooling()
        except HandlerLoadError as error:
            self._pooling_error = self._pooling_error or str(error)
            return ["mean"]

    def parse_value(self, value: Any, parameters: Mapping[str, Any]) -> tuple[Any, str | None]:
        if self._pooling_error and parameters.get("output_value") == SENTENCE:
            raise PredictionException(f"This model has no {SENTENCE}: {self._pooling_error}.", 400)
        return super().parse_value(value, parameters)


class SentenceEmbedding(_EmbeddingTask):
    """A task that answers one vector of norm 1 per text: the mean of its tokens', or as ``1_Pooling``
    configures.

    modules.json configures the folders of sentence-transformers.
    """

    model_outputs = (SENTENCE, TOKENS)
    applies_default_prompt = True

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(directory, config, options, defaults)
        config_file = read_json(directory / "sentence_bert_config.json")
        if max_length := config_file.get("max_seq_length"):
            self.max_length = min(max_length, self.max_length or max_length)
        self._lower = config_file.get("do_lower_case") is True

    def parse_inputs(self, value: Any) -> tuple[Any, str | None]:
        text, pair = super().parse_inputs(value)
        return (text.lower() if self._lower else text), pair


class MultiVectorEmbedding(_EmbeddingTask):
    """A task that answers a vector for each token of a text, for late interaction as in ColBERT.

    modules.json configures the folders of sentence-transformers' MultiVectorEncoder. With the prompt
    ``query`` the text is a query, else a document.
    """

    model_outputs = (TOKENS,)
    applies_default_prompt = True
    served_modules = ("Transformer", "Dense", "Normalize", "MultiVectorMask")

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(directory, config, options, defaults)
        file = directory / "sentence_bert_config.json"
        settings, mask = read_json(file), self._modules.find("MultiVectorMask")
        mask_settings = {} if mask is None else read_json(mask / "config.json")
        for place, given, name in (
            (file, settings, "query_expansion"),
            (mask, mask_settings, "keep_only_token_ids"),
        ):
            if given.get(name) is not None:
                raise HandlerLoadError(f"{place}: {name} is not served; write a handler that runs the model")
        self.normalized_outputs = self._modules.normalized
        self._limits = {
            kind: min(filter(None, (settings.get(f"{kind}_length"), self.max_length)), default=None)
            for kind in _TEXT_KINDS
        }
        words = mask_settings.get("skiplist_words") or []
        skipped = set(self.tokenizer.convert_tokens_to_ids(words)) - {self.tokenizer.unk_token_id}
        kinds = mask_settings.get("skiplist_tasks", ["document"])
        self._skipped = {kind: torch.tensor(sorted(skipped)) for kind in _TEXT_KINDS if kind in kinds}

    def _select_pooling(self) -> list[str]:
        return []

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "pooling": "none"}

    def get_limit(self, parameters: Mapping[str, Any]) -> int | None:
        return self._limits[_find_kind(parameters)]

    def select_tokens(self, encoded: Any, examples: Sequence[TaskInput]) -> torch.Tensor:
        mask, ids = super().select_tokens(encoded, examples), encoded["input_ids"].cpu()
        for index, example in enumerate(examples):
            if (skipped := self._skipped.get(_find_kind(example.parameters))) is not None:
                mask[index] &= ~torch.isin(ids[index], skipped)
        return mask

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Pool by the mean, which explanations compare."""
        return _pool_mean(hidden, mask)


class SparseEmbedding(EncoderTask):
    """A task that answers the weights of the vocabulary's terms for a text, those above 0, as SPLADE.

    The answer is ``[{"index", "value"}]``. A weight is the largest of the tokens' ``log(1 + relu(logit))``
    of a masked language model, unless modules.json has a SpladePooling of other settings.
    """

    auto_class = "AutoModelForMaskedLM"
    model_outputs = (SPARSE,)
    applies_default_prompt = True

    def __init__(
        self, directory: Path, config: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(directory, config, options, defaults)
        pooling = _read_splade_pooling(directory)
        self._sums = pooling.get("pooling_strategy", "max") == "sum"
        self._logarithms = 2 if pooling.get("activation_function") == "log1p_relu" else 1

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "pooling": "splade"}

    def pool(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the weight of each term: of tokens x terms, or of several texts of equal length."""
        weights = (logits if self._sums else logits.amax(dim=-2)).float().relu()
        for _ in range(self._logarithms):
            weights = weights.log1p()
        return weights.sum(dim=-2) if self._sums else weights

    def postprocess(self, output: Any, encoded: Any, examples: Sequence[TaskInput]) -> list[Any]:
        masks = encoded["attention_mask"].bool()
        answers: list[Any] = []
        for logits, mask, example in zip(output.logits, masks, examples):  # one text after the other:
            weights = self.pool(logits[mask]).cpu()  # tokens x terms are much memory
            indices = weights.nonzero()[:, 0].tolist()
            values = weights[indices].tolist()
            answer = [{"index": index, "value": value} for index, value in zip(indices, values)]
            answers.append(with_count(answer, example, mask))
        return answers

    def explain(self, model: Any, example: TaskInput, options: ExplanationOptions) -> Any:
        """Return the attribution of each token to the weight of a term: ``target``, its id or its text.

        The default is the term of the largest weight.
        """
        encoded = self.encode([example])
        term = self._find_term(model, encoded, options.target)
        explanation = attributions.attribute_encoded(
            model,
            self.tokenizer,
            encoded,
            self.text_mask(encoded),
            options.for_target(0),
            lambda output: self.pool(output.logits)[:, term],
        )
        return {"target": self.tokenizer.convert_ids_to_tokens(term), **explanation}

    def _find_term(self, model: Any, encoded: Any, target: Any) -> int:
        if target in (None, ""):
            with torch.inference_mode():
                return int(self.pool(self.forward(model, encoded, model.device).logits[0]).argmax())
        term = self.tokenizer.get_vocab().get(target) if isinstance(target, str) else None
        term = parse_integer(target) if term is None else term
        if term is None or not 0 <= term < self.config.vocab_size:
            raise PredictionException(
                f"There is no term {target!r:.100}: the target is a token of the vocabulary, or its id.", 400
            )
        return term


def _pool_cls(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # the first token that is no padding
    return hidden[torch.arange(len(hidden)), mask.squeeze(-1).argmax(dim=1)]


def _pool_last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(mask.shape[1], device=mask.device)
    return hidden[torch.arange(len(hidden)), (mask.squeeze(-1) * positions).argmax(dim=1)]


def _pool_mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)


def _pool_mean_sqrt(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9).sqrt()


def _pool_max(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(mask == 0, -torch.inf).amax(dim=1)


# The names of sentence-transformers; several poolings are concatenated in this order.
_POOLS = {
    "cls": _pool_cls,
    "lasttoken": _pool_last,
    "max": _pool_max,
    "mean": _pool_mean,
    "mean_sqrt_len_tokens": _pool_mean_sqrt,
}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_TEXT_KINDS = ("document", "query")
_SPARSE_MODULES = ("MLMTransformer", "Transformer", "SpladePooling")
_SPLADE_SETTINGS = {"pooling_strategy": ("max", "sum"), "activation_function": ("relu", "log1p_relu")}


def _name_poolings(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the poolings; the default is the mean. Raises HandlerLoadError for unknown ones."""
    mode = settings.get("pooling_mode")
    enabled = [name for flag, name in _FLAGS.items() if settings.get(flag)]
    names = [mode] if isinstance(mode, str) else mode or enabled
    unknown = [name for name in names if name not in _POOLS]
    if unknown:
        raise HandlerLoadError(
            f"{folder}: the pooling {unknown[0]!r} is not served; there are {', '.join(_POOLS)}"
        )
    return names or ["mean"]


def _read_splade_pooling(directory: Path) -> dict[str, Any]:
    """Return the settings of the folder's SpladePooling. Raises HandlerLoadError for unsupported ones."""
    folder = EmbeddingModules(directory, _SPARSE_MODULES).find("SpladePooling")
    config: dict[str, Any] = {} if folder is None else read_json(folder / "config.json")
    for name, known in _SPLADE_SETTINGS.items():
        if config.get(name, known[0]) not in known:
            raise HandlerLoadError(
                f"{folder}: {name} is {config[name]!r}, which is not served; there are {', '.join(known)}"
            )
    return config


def _find_kind(parameters: Mapping[str, Any]) -> str:
    return "query" if parameters.get("prompt_name") == "query" else "document"
