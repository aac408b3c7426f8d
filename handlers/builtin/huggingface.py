"""The built-in handler ``huggingface``: a Hugging Face model folder without an archive or code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from handlers import tasks
from handlers.base import BaseHandler
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain import attributions
from handlers.images import apply_pixel_limit
from handlers.loading import device
from handlers.optimize import compile
from handlers.tasks.base import ImageTask, TaskInput, TextTask, extract_explanation_fields
from handlers.torchserve_compat.timer import timed


class HuggingFace(BaseHandler):
    """A handler of one task, named as transformers' pipelines are.

    The task is model-config.yaml's ``task``, or the folder's own. A batch is one forward. ``parameters`` in
    model-config.yaml has the defaults of a request's parameters. ``trusted`` comes from the registration or
    the settings, and allows pickled weights and the folder's own code.
    """

    # Images and audio are decoded before their batch. Texts are not: parsing them takes less than passing
    # them on.
    prepare_row: Any = None
    takes_parameters = True  # of a request, beside its inputs
    length: Any = None  # in tokens, for texts if model-config.yaml has bucket_by_length

    def initialize(self, context: Any) -> None:
        self.context = context
        self.manifest = context.manifest
        self.model_yaml_config = config = getattr(context, "model_yaml_config", None) or {}
        self.device = device.select_device(context.system_properties.get("gpu_id"))
        self.map_location = self.device.type
        directory = Path(context.system_properties["model_dir"])
        trusted = config.get("trusted") is True
        try:
            self.task_name = tasks.select_task(directory, config.get("task"), trusted)
        except HandlerLoadError as error:
            raise HandlerLoadError(f"{directory}: {error}") from None
        task_class = tasks.load_task_class(self.task_name)
        self.explanation_options = attributions.ExplanationOptions.from_config(
            config, task_class.default_target
        )
        self.model, self.task = task_class.load(directory, trusted, config.get("parameters") or {})
        self.task.is_cancelled = lambda: bool(getattr(self.context, "cancelled", False))
        self.model.to(self.device).eval()
        self.model = compile.compile_model(self.model, config.get("pt2"))
        self._apply_optimization(directory)
        if self.task.prepares_rows:
            self.prepare_row = self.task.parse
        if isinstance(self.task, ImageTask):
            apply_pixel_limit(context)
        elif isinstance(self.task, TextTask) and config.get("bucket_by_length") is True:
            self.length = self.task.length_function()
        self._enable_micro_batching()
        self.initialized = True

    @timed
    def preprocess(self, data: list[Any]) -> Any:
        """Return each row's parsed input, and the model's input, None where no row needs it."""
        examples = self._map_rows(data, self._parse_row)
        computed = list(filter(self.task.needs_model, examples))
        return examples, self.task.encode(computed) if computed else None

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        examples, encoded = data
        if encoded is None:
            return examples, None, None
        with torch.inference_mode():
            return examples, encoded, self.task.forward(self.model, encoded, self.device)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        examples, encoded, output = data
        computed = list(filter(self.task.needs_model, examples))
        values = self.task.postprocess(output, encoded, computed) if computed else []
        if isinstance(values, torch.Tensor):
            values = self._to_values(values)
        if len(computed) == len(examples):
            return values
        remaining = iter(values)
        return [
            next(remaining) if self.task.needs_model(example) else self.task.answer_without_model(example)
            for example in examples
        ]

    def _run_stages(self, data: list[Any], span: Callable[[str], Any]) -> list[Any]:
        return super()._run_stages(
            [extract_explanation_fields(row) for row in data] if self._is_explain() else data, span
        )

    def explain_handle(self, data_preprocess: Any, raw_data: list[Any]) -> list[Any]:
        """Return the insights of each row by itself.

        They are an attribution for each token of a text, or for each number of an image's tensor.
        """
        examples, _ = data_preprocess
        return self._insights_by_row(examples, raw_data)

    def get_insights(self, tensor_data: TaskInput, raw_data: Any, target: Any = None) -> list[Any]:
        """Return the task's explanation of a row's ``target``: a label, an entity, a second text ..."""
        if not self.task.needs_model(tensor_data):
            raise PredictionException(
                "An output of the tokenizer is not explained; leave out output_value.", 400
            )
        # The unparsed target: "007" is a text.
        target = self.explained_row.get("target") if isinstance(self.explained_row, Mapping) else None
        if isinstance(target, (bytes, bytearray)):
            target = target.decode(errors="replace")
        options = self.explanation_options.for_row(
            self.explained_row, self.explanation_options.target if target in (None, "") else target
        )
        return [self.task.explain(self.model, tensor_data, options)]

    def describe_handle(self) -> dict[str, Any]:
        """Return the task, the parameters of a request, the architecture, and what the task adds."""
        parameters = {name: parameter.expected for name, parameter in self.task.parameters.items()}
        return {
            "task": self.task_name,
            "parameters": parameters,
            "architecture": self.task.config.architectures,
            "dtype": str(self._input_dtype(torch.empty(0))).removeprefix("torch."),
            **self.task.describe(),
        }

    def _parse_row(self, row: Any) -> TaskInput:
        prepared = getattr(row, "prepared", None)
        if isinstance(prepared, PredictionException):
            raise prepared
        return prepared if isinstance(prepared, TaskInput) else self.task.parse(row)
