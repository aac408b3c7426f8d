"""The built-in handler ``causal_lm``: a Hugging Face language model, whole or sharded over processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from handlers.builtin.causal_lm_request import BatchRequest, parse_batch_request
from handlers.distributed import placement
from handlers.distributed.degrees import degrees
from handlers.engines.batch_decoding import RowDecoder, decode_rows, list_end_tokens
from handlers.engines.engine import SamplingParams
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain.unsupported import refuse_explanations


class CausalLM:
    """A handler that generates for whole batches with the archive's Hugging Face folder.

    ``tensor_parallel`` and ``pipeline_parallel`` shard the model, by the ``engine`` of model-config.yaml. An
    unsharded model may be placed on several devices, by ``device_map``.

    A row is JSON, ``{"prompt": a text or a list of token ids, "max_new_tokens": 64}``, with the parameters of
    sampling, ``stop`` and ``stream`` of the handler ``llm``; it is greedy by default. Its value is
    ``{"tokens", "text"}``, with the text if the folder has a tokenizer; with ``stream``, chunks of the text.
    For ``{"prompt", "logits": true}`` it is ``{"logits"}``: the score of each token of the vocabulary as the
    next token. The rows of a batch run together.
    """

    takes_parameters = True  # of a request, beside its inputs

    def __init__(self) -> None:
        self.model: Any = None
        self.tokenizer: Any = None
        self._in_pipeline = False
        self._end_tokens: list[int] = []
        self._default_sampling = SamplingParams()

    def initialize(self, context: Any) -> None:
        from transformers import AutoTokenizer

        folder = _find_model_folder(Path(context.system_properties["model_dir"]))
        _, pipeline = degrees(context.model_yaml_config)
        self._in_pipeline = pipeline > 1
        self.model = placement.load(folder, context.system_properties["gpu_id"], context.model_yaml_config)
        if (folder / "tokenizer_config.json").is_file():
            self.tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        penalty = self.model.generation_config.repetition_penalty
        self._default_sampling = SamplingParams(repetition_penalty=1.0 if penalty is None else penalty)
        self._end_tokens = list_end_tokens(self.model)

    def handle(self, data: list[Any], context: Any) -> list[Any]:
        refuse_explanations("causal_lm", context)
        values: list[Any] = [None] * len(data)
        requests: dict[int, BatchRequest] = {}
        for index, row in enumerate(data):
            try:
                requests[index] = self._parse_row(row)
            except PredictionException as error:
                values[index] = error
        with torch.inference_mode():
            if scored := [index for index in requests if requests[index].logits]:
                results = self._compute_logits([requests[index] for index in scored])
                for index, value in zip(scored, results):
                    values[index] = value
            rows = {
                index: self._create_row(index, request, context)
                for index, request in requests.items()
                if not request.logits
            }
            for group in self._group_rows(list(rows.values())):
                self._decode(group)
        for index, decoded in rows.items():
            values[index] = self._format_row(decoded, requests[index].stream)
        return values

    def _parse_row(self, row: Any) -> BatchRequest:
        request = parse_batch_request(row, self._default_sampling, self.tokenizer, self.model.config)
        if request.stream and request.logits:
            raise PredictionException("stream and logits are alternatives: give one of them.", 400)
        return request

    def _create_row(self, index: int, request: BatchRequest, context: Any) -> RowDecoder:
        send: Callable[[str], None] | None = None
        if request.stream:
            context.set_response_content_type(index, "text/plain; charset=utf-8")
            send = partial(context.emit, index)
        return RowDecoder(
            request.tokens,
            request.sampling,
            request.max_new_tokens,
            self._end_tokens,
            request.stops,
            None if self.tokenizer is None else self._decode_text,
            send,
        )

    def _decode_text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _pad(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        """Return the prompts as one tensor, padded on the left, with their mask."""
        length = max(map(len, prompts))
        tokens = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device = placement.input_device(self.model)
        return {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}

    def _compute_logits(self, requests: list[BatchRequest]) -> list[Any]:
        inputs = self._pad([request.tokens for request in requests])
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = self.model(**inputs, position_ids=positions).logits[:, -1].float()
        return [{"logits": row} for row in logits.tolist()]

    def _group_rows(self, rows: list[RowDecoder]) -> list[list[RowDecoder]]:
        """Return the rows that are decoded together.

        In a pipeline, transformers' ``generate`` reads the padding of a prompt as a part of it, so there the
        prompts of a group have one length.
        """
        if not self._in_pipeline:
            return [rows] if rows else []
        lengths = sorted({len(row.prompt) for row in rows})
        return [[row for row in rows if len(row.prompt) == length] for length in lengths]

    def _decode(self, rows: list[RowDecoder]) -> None:
        inputs = self._pad([row.prompt for row in rows])
        if hasattr(self.model, "decode_rows"):  # an engine with a loop of its own
            self.model.decode_rows(inputs, rows)
        else:
            decode_rows(self.model, inputs, rows)

    def _format_row(self, row: RowDecoder, stream: bool) -> Any:
        """Return a row's value; of a stream, the text that was not sent yet."""
        decoded = row.finish()
        if row.error is not None:
            return row.error
        if stream and decoded is not None:
            return decoded[1]
        if self.tokenizer is None:
            return {"tokens": row.tokens}
        if decoded is not None:
            return {"tokens": row.tokens, "text": decoded[0]}
        return {"tokens": row.tokens, "text": self.tokenizer.decode(row.tokens, skip_special_tokens=True)}


def _find_model_folder(directory: Path) -> Path:
    """Return the folder with the model's config.json: the archive itself, or a folder in it."""
    if (directory / "config.json").is_file():
        return directory
    for config in sorted(directory.glob("*/config.json")):
        return config.parent
    raise HandlerLoadError(f"{directory}: no config.json in it. Pack a Hugging Face folder's files.")
