"""A Hugging Face model folder as it stands: no archive, no code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from handlers import compilation, device, explanations, tasks
from handlers.base import BaseHandler
from handlers.errors import HandlerLoadError, PredictionException
from handlers.tasks.base import Example, ImageTask, TextTask, unfolded
from handlers.timer import timed
from handlers.vision import heed_pixel_limit


class HuggingFace(BaseHandler):
    """Answers a task, by the names of transformers' pipelines: model-config.yaml's ``task``, or the folder's own.

    A batch is one forward. ``trusted: true`` there lets pickled weights and the folder's own code in, and
    ``parameters`` are the defaults of a request's.
    """

    prepare_row: Any = None  # images are decoded ahead; a text is read faster than handed over
    length: Any = None  # in tokens, of a text where model-config.yaml has bucket_by_length

    def initialize(self, context: Any) -> None:
        self.context = context
        self.manifest = context.manifest
        self.model_yaml_config = config = getattr(context, "model_yaml_config", None) or {}
        self.device = device.choose(context.system_properties.get("gpu_id"))
        self.map_location = self.device.type
        directory = Path(context.system_properties["model_dir"])
        trusted = config.get("trusted") is True
        try:
            self.task_name = tasks.choose(directory, config.get("task"), trusted)
        except HandlerLoadError as error:
            raise HandlerLoadError(f"{directory}: {error}") from None
        task_class = tasks.task_class(self.task_name)
        self.question = explanations.Question.read(config, task_class.target)
        self.model, self.task = task_class.load(directory, trusted, config.get("parameters") or {})
        self.model.to(self.device).eval()
        self.model = compilation.compiled(self.model, config.get("pt2"))
        self._optimise(directory)
        if isinstance(self.task, ImageTask):
            self.prepare_row = self.task.read
            heed_pixel_limit(context)
        elif isinstance(self.task, TextTask) and config.get("bucket_by_length") is True:
            self.length = self.task.length()
        self._micro_batch()
        self.initialized = True

    @timed
    def preprocess(self, data: list[Any]) -> Any:
        """What each row asks, and all of it as the model's input."""
        examples = self._each(data, self._example)
        return examples, self.task.encode(examples)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        examples, encoded = data
        with torch.inference_mode():
            return examples, encoded, self.task.forward(self.model, encoded, self.device)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        examples, encoded, output = data
        answers = self.task.answers(output, encoded, examples)
        return self._numbers(answers) if isinstance(answers, torch.Tensor) else answers

    def _run(self, data: list[Any], mark: Callable[[str], Any]) -> list[Any]:
        return super()._run([unfolded(row) for row in data] if self._is_explain() else data, mark)

    def explain_handle(self, data_preprocess: Any, raw_data: list[Any]) -> list[Any]:
        """Each row by itself: an attribution for each token of a text, or for each number of an image's tensor."""
        examples, _ = data_preprocess
        return self._insights_by_row(examples, raw_data)

    def get_insights(self, tensor_data: Example, raw_data: Any, target: Any = None) -> list[Any]:
        """What the task makes of a row's ``target``: a label, an entity, a second text ..."""
        target = self.asked.get("target") if isinstance(self.asked, Mapping) else None  # as it came: "007" is a text
        if isinstance(target, (bytes, bytearray)):
            target = target.decode(errors="replace")
        question = self.question.of(self.asked, self.question.target if target in (None, "") else target)
        return [self.task.explain(self.model, tensor_data, question)]

    def describe_handle(self) -> dict[str, Any]:
        """The task, the parameters that a request may have, and the architecture."""
        parameters = {name: parameter.wants for name, parameter in self.task.parameters.items()}
        return {"task": self.task_name, "parameters": parameters, "architecture": self.task.config.architectures}

    def _example(self, row: Any) -> Example:
        prepared = getattr(row, "prepared", None)
        if isinstance(prepared, PredictionException):
            raise prepared
        return prepared if isinstance(prepared, Example) else self.task.read(row)
