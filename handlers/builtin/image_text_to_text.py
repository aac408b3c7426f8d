"""The built-in handler ``image_text_to_text``: chats about images, for whole batches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from handlers import ignored_fields, json_text
from handlers.builtin.llm import find_model_folder
from handlers.builtin.vertex_instance import find_instance
from handlers.builtin.vision import ToRGB
from handlers.engines import openai, openai_response
from handlers.engines.batch_decoding import RowDecoder, decode_rows, list_end_tokens
from handlers.engines.engine import SamplingParams
from handlers.errors import HandlerLoadError, PredictionException
from handlers.images import apply_pixel_limit, check_images, check_processor, decode_base64, open_image
from handlers.loading import device

MAX_IMAGES = 16  # of a request
_DEFAULT_NEW_TOKENS = 256
_DATA_URL = re.compile(r"data:(?:image/[\w.+-]+)?;base64,", re.IGNORECASE)
_RGB = ToRGB()


@dataclass
class ImageChat:
    """A row's chat: its prompt, its images, and the decoders of its choices."""

    index: int
    request: openai.CompletionRequest
    prompt: str
    images: list[Any]
    response: openai_response.CompletionResponse
    decoders: list[RowDecoder] = field(default_factory=list)
    prompt_tokens: int = 0
    error: PredictionException | None = None


class ImageTextToText:
    """A handler of a Hugging Face folder of a model that reads images and texts, and writes texts.

    A row is a body of OpenAI's chat completions, whose messages have parts of the types ``text`` and
    ``image_url``, with a ``data:`` URL. Nothing is fetched. The rows of a batch run together, and may stream.
    The folder's processor prepares the images with Pillow.
    """

    input_type = "application/json"
    takes_parameters = True  # of a request, beside its instances
    instance_defaults: ClassVar[Mapping[str, Any]] = {}  # of instances behind the envelope vertex

    def __init__(self) -> None:
        self.model: Any = None
        self.processor: Any = None
        self._capacity: int | None = None  # in tokens of a prompt and its answer
        self._end_tokens: list[int] = []

    def initialize(self, context: Any) -> None:
        folder = find_model_folder(context)
        self.processor, self.model = _load(folder, context.model_yaml_config.get("trusted") is True)
        self.model.to(device.select_device(context.system_properties["gpu_id"])).eval()
        apply_pixel_limit(context)
        self._tokenizer = self.processor.tokenizer
        self._tokenizer.padding_side = "left"  # the generated tokens must follow the prompt
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._capacity = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self._end_tokens = list_end_tokens(self.model)

    def handle(self, data: list[Any], context: Any) -> list[Any]:
        if context.get_request_header(0, "describe") == "True":
            return [self.describe_handle() for _ in data]
        if context.get_request_header(0, "explain") == "True":
            raise PredictionException("The handler image_text_to_text explains nothing.", 501)
        values: list[Any] = [None] * len(data)
        chats = []
        for index, row in enumerate(data):
            try:
                if context.get_request_header(index, "url_path") == openai.MODELS:
                    values[index] = openai_response.list_models(context.model_name)
                else:
                    chats.append(self._parse(index, row, context))
            except PredictionException as error:
                values[index] = error
        for has_images in (False, True):  # processors take batches of one kind
            if group := [chat for chat in chats if bool(chat.images) is has_images]:
                self._generate(group, context)
        for chat in chats:
            values[chat.index] = self._finish(chat, context)
        return values

    def describe_handle(self) -> dict[str, Any]:
        """Return the limits of a request."""
        return {"input": ["messages"], "max_images": MAX_IMAGES, "max_length": self._capacity}

    def _parse(self, index: int, row: Any, context: Any) -> ImageChat:
        path = context.get_request_header(index, "url_path") or openai.CHAT
        if path == openai.COMPLETIONS:
            raise PredictionException(f"This model chats: send messages to {openai.CHAT}.", 400)
        if (instance := find_instance(row)) is not None:
            row = {"body": instance.body}
        request = openai.parse_request(path, row, SamplingParams(), take_images=True)
        _refuse_unsupported(request)
        if request.ignored:
            names = ignored_fields.format_ignored(request.ignored)
            context.set_response_header(index, ignored_fields.HEADER, names)
        parts = [part for message in request.messages for part in message["content"]]
        images = self._open([part["url"] for part in parts if part["type"] == "image"], request.n)
        response = openai_response.CompletionResponse(request, context.model_name, self._decode)
        return ImageChat(index, request, self._apply_template(request), images, response)

    def _open(self, urls: Sequence[str], copies: int) -> list[Any]:
        """Return the images of a chat, each of whose choices gets a copy of them. Raises PredictionException.

        Their number and sizes are checked before any is decoded.
        """
        if len(urls) > MAX_IMAGES:
            raise PredictionException(f"The chat has {len(urls)} images, and may have {MAX_IMAGES}.", 400)
        if len(urls) * copies > MAX_IMAGES:
            raise PredictionException(
                f"n is {copies}, and n times the images ({len(urls)}) is at most {MAX_IMAGES}: send several "
                "requests.",
                400,
            )
        contents = [_read_url(url) for url in urls]
        check_images(contents)
        images = []
        for content in contents:
            image = open_image(content)
            check_processor(self.processor.image_processor, image.size)
            images.append(_RGB(image))
        return images

    def _apply_template(self, request: openai.CompletionRequest) -> str:
        from jinja2.exceptions import TemplateError

        messages = [
            {
                **message,
                "content": [{"type": "image"} if p["type"] == "image" else p for p in message["content"]],
            }
            for message in request.messages
        ]
        try:
            prompt: str = self.processor.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **request.template_variables
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise PredictionException(
                f"The model's chat template does not take these messages: {error}", 400
            ) from None
        return prompt

    def _generate(self, chats: Sequence[ImageChat], context: Any) -> None:
        """Generate the texts of chats that all have images, or all have none."""
        encoded: dict[int, Any] = {}
        for chat in chats:
            try:
                inputs = self._encode([chat])
                chat.prompt_tokens = int(inputs["attention_mask"].sum())
                self._create_decoders(chat, context)
                encoded[chat.index] = inputs
            except PredictionException as error:
                chat.error = error
        chats = [chat for chat in chats if chat.index in encoded]
        if len(chats) == 1 and len(chats[0].decoders) == 1:
            self._decode_rows(encoded[chats[0].index], chats)
        elif chats:
            self._decode_batch(chats)

    def _decode_batch(self, chats: Sequence[ImageChat]) -> None:
        """Generate together, or one chat after the other where the processor refuses them as a batch."""
        try:
            inputs = self._encode([chat for chat in chats for _ in chat.decoders])
        except PredictionException as error:
            if len(chats) == 1:
                chats[0].error = error
                return
            for chat in chats:
                self._decode_batch([chat])
            return
        self._decode_rows(inputs, chats)

    def _decode_rows(self, inputs: Any, chats: Sequence[ImageChat]) -> None:
        inputs = inputs.to(self.model.device, self.model.dtype)
        with torch.inference_mode():
            decode_rows(self.model, dict(inputs), [row for chat in chats for row in chat.decoders])

    def _encode(self, chats: Sequence[ImageChat]) -> Any:
        images = [chat.images for chat in chats]
        try:
            return self.processor(
                text=[chat.prompt for chat in chats],
                images=images if any(images) else None,
                padding=True,
                add_special_tokens=False,
                return_tensors="pt",
            )
        except (ValueError, IndexError, StopIteration) as error:
            raise PredictionException(f"The processor does not take these messages: {error}", 400) from error

    def _create_decoders(self, chat: ImageChat, context: Any) -> None:
        request, count = chat.request, chat.request.max_new_tokens
        free = None if self._capacity is None else self._capacity - chat.prompt_tokens
        if free is not None and free < (count or 1):
            raise PredictionException(
                f"The prompt has {chat.prompt_tokens} tokens with its images, and {count or 1} more exceed "
                f"the model's {self._capacity}: send a shorter chat, or less max_tokens.",
                400,
            )
        count = count or min(_DEFAULT_NEW_TOKENS, free or _DEFAULT_NEW_TOKENS)
        openai.check_output_size(request, count)
        if request.stream:
            context.set_response_content_type(chat.index, openai.EVENT_STREAM)
        ids = self._tokenizer(json_text.check_text(chat.prompt), add_special_tokens=False)["input_ids"]
        for number in range(request.n):
            sampling, send = request.sampling, None
            if sampling.seed is not None:
                sampling = replace(sampling, seed=sampling.seed + number)
            if request.stream:
                send = partial(_send, chat, number, context)
            row = RowDecoder(ids, sampling, count, self._end_tokens, request.stops, self._decode, send)
            chat.decoders.append(row)

    def _finish(self, chat: ImageChat, context: Any) -> Any:
        """Return the response, or the last events of a stream."""
        if chat.error is not None:
            return chat.error
        if error := next((row.error for row in chat.decoders if row.error is not None), None):
            return error
        choices, events, new_tokens = [], b"", 0
        for number, row in enumerate(chat.decoders):
            text, rest = row.finish() or (self._decode(row.tokens), "")
            new_tokens += len(row.tokens)
            reason = "length" if len(row.tokens) >= row.max_new_tokens and not row.stopped else "stop"
            if chat.request.stream:
                events += chat.response.finish_events(number, rest, (), reason, (), row.stop)
            else:
                choices.append(chat.response.build_choice(number, text, (), reason, (), row.stop))
        usage = {
            "prompt_tokens": chat.prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": chat.prompt_tokens + new_tokens,
        }
        if chat.request.stream:
            return events + chat.response.done_events(usage)
        return chat.response.build(choices, usage)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def _read_url(url: str) -> bytes:
    """Return the bytes of a data: URL. Raises PredictionException."""
    match = _DATA_URL.match(url)
    if match is None:
        raise PredictionException(
            "image_url is a data: URL, as data:image/png;base64,...: this server fetches no images, and "
            f"the URL begins with {url[:20]!r}.",
            400,
        )
    return decode_base64(url[match.end() :])


def _send(chat: ImageChat, number: int, context: Any, text: str) -> None:
    context.emit(chat.index, chat.response.text_event(number, text, ()))


def _refuse_unsupported(request: openai.CompletionRequest) -> None:
    for name, is_given in (
        ("tools", bool(request.tools)),
        ("logprobs", request.sampling.logprobs is not None),
        ("response_format", request.sampling.structured_output is not None),
    ):
        if is_given:
            raise PredictionException(f"{name} is not served by a model of images: leave it out.", 400)


def _load(folder: Path, trusted: bool) -> tuple[Any, Any]:
    """Return the processor and the model on the CPU; the folder's code is never run.

    Raises HandlerLoadError.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        processor = transformers.AutoProcessor.from_pretrained(folder, backend="pil", **options)
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, use_safetensors=None if trusted else True, **options
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, TypeError) as error:
        raise HandlerLoadError(f"{folder}: transformers cannot load it: {error}") from error
    missing = [name for name in ("tokenizer", "image_processor") if getattr(processor, name, None) is None]
    if missing:
        raise HandlerLoadError(
            f"{folder}: its {type(processor).__name__} has no {missing[0]}; image_text_to_text is for models "
            "that read images and texts. Take the handler llm for a model of texts."
        )
    if not getattr(processor, "chat_template", None):
        raise HandlerLoadError(
            f"{folder}: its processor has no chat template; add chat_template.jinja to the folder"
        )
    return processor, model
