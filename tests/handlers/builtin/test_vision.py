"""Tests of images, from their bytes to labels.

The expected values are computed with numpy, torch's interpolate and plain arithmetic.
"""

from __future__ import annotations

import base64
import io
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_sample_image

import handlers
from handlers.builtin.image_classifier import ImageClassifier
from handlers.builtin.vision import CenterCrop, Compose, Normalize, Resize, ToRGB, ToTensor, VisionHandler
from handlers.context import Context
from handlers.errors import PredictionException
from handlers.images import check_image

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, {classes}, kernel_size=4, stride=4)

    def forward(self, x):
        return self.conv(x).mean(dim=(2, 3))
"""
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def encode_png(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def china() -> Image.Image:
    return Image.fromarray(load_sample_image("china.jpg"))


def make_noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    return Image.fromarray(np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8))


@pytest.mark.parametrize(
    ("size", "target", "width", "height"),
    [
        ((640, 427), 256, 383, 256),
        ((427, 640), 256, 256, 383),
        ((100, 100), 256, 256, 256),
        ((64, 48), (20, 30), 30, 20),
    ],
)
def test_resize_equals_antialiased_interpolation(
    size: tuple[int, int], target: Any, width: int, height: int
) -> None:
    image = make_noise(*size)
    resized = Resize(target)(image)
    assert resized.size == (width, height)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    expected = torch.nn.functional.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    # Pillow rounds to whole levels after each of its two passes.
    assert (torch.from_numpy(np.array(resized)).permute(2, 0, 1) - expected[0]).abs().max() <= 1.01


def test_resize_returns_images_of_the_right_size() -> None:
    image = make_noise(256, 300)
    assert Resize(256)(image) is image


def test_center_crop_cuts_out_the_center() -> None:
    image = make_noise(9, 6)
    pixels = np.array(image)
    assert np.array_equal(np.array(CenterCrop(4)(image)), pixels[1:5, 2:6]), (
        "2.5 pixels of margin round to even, 2"
    )
    assert np.array_equal(np.array(CenterCrop((6, 3))(image)), pixels[:, 3:6])


def test_center_crop_adds_a_black_border() -> None:
    image = make_noise(3, 2)
    cropped = np.array(CenterCrop(6)(image))
    assert np.array_equal(cropped[2:4, 1:4], np.array(image))
    assert cropped.sum() == np.array(image).sum()


def test_to_tensor_scales_8_bit_images() -> None:
    image = make_noise(5, 3)
    tensor = ToTensor()(image)
    assert tensor.shape == (3, 3, 5) and tensor.dtype == torch.float32 and tensor.is_contiguous()
    assert np.allclose(tensor.numpy(), np.array(image).transpose(2, 0, 1) / 255, atol=1e-7)
    assert ToTensor()(make_noise(5, 3, "L")).shape == (1, 3, 5)
    assert ToTensor()(Image.new("1", (2, 2), 1)).tolist() == [[[1.0, 1.0], [1.0, 1.0]]]
    image_16_bit = Image.fromarray(np.array([[0, 40_000]], dtype=np.uint16))
    assert ToTensor()(image_16_bit).tolist() == [[[0.0, 40_000.0]]]
    assert torch.equal(ToTensor()(np.array(image)), tensor)


def test_normalize_uses_mean_and_deviation() -> None:
    tensor = torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(1))
    expected = (tensor.numpy() - MEAN[:, None, None]) / STD[:, None, None]
    assert np.allclose(Normalize(tuple(MEAN), tuple(STD))(tensor).numpy(), expected, atol=1e-6)


def test_compose_applies_transforms_in_order() -> None:
    image = make_noise(50, 40, "RGBA")
    transformed = Compose([ToRGB(), Resize(20), CenterCrop((10, 12)), ToTensor()])(image)
    assert torch.equal(transformed, ToTensor()(CenterCrop((10, 12))(Resize(20)(image.convert("RGB")))))


@pytest.fixture
def classify(archive: Callable[..., Path], begin: Callable[..., Context]) -> Callable[..., Any]:
    """Return ``run(rows, classes, mapping, source)``, which returns the values of image_classifier and its
    convolution.

    ``source`` replaces image_classifier by a handler of its own.
    """

    def run(rows: list[dict[str, Any]], classes: int = 8, mapping: Any = None, source: str = "") -> Any:
        directory = archive(model=MODEL.format(classes=classes), handler=source)
        torch.manual_seed(5)
        weights = torch.nn.ModuleDict({"conv": torch.nn.Conv2d(3, classes, 4, 4)})
        torch.save(weights.state_dict(), directory / "model.pt")
        if mapping is not None:
            (directory / "index_to_name.json").write_text(json.dumps(mapping))
        model = {"modelFile": "model.py", "serializedFile": "model.pt"}
        entry = handlers.load("handler.py" if source else "image_classifier", directory, {"model": model})
        context = Context("shapes", str(directory), {"model": model}, batch_size=len(rows))
        entry.initialize(context)
        return entry(rows, begin(context, len(rows))), weights["conv"]

    return run


def expected(image: Image.Image, conv: torch.nn.Conv2d) -> np.ndarray:
    """Return the classes' probabilities after resizing to 256, cropping to 224 and normalizing as for
    ImageNet.
    """
    size = tuple(side * 256 // min(image.size) for side in image.size)
    resized = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    left, top = round((resized.width - 224) / 2), round((resized.height - 224) / 2)
    pixels = (np.array(resized)[top : top + 224, left : left + 224] / 255 - MEAN) / STD
    # The mean of a convolution equals the convolution of the mean patch.
    patches = pixels.reshape(56, 4, 56, 4, 3).mean(axis=(0, 2))
    logits = np.einsum("ocyx,yxc->o", conv.weight.detach().numpy(), patches) + conv.bias.detach().numpy()
    return np.exp(logits) / np.exp(logits).sum()


def test_the_five_most_probable_classes_are_returned(classify: Any, china: Image.Image) -> None:
    names = {str(index): [f"n{index}", f"thing {index}"] for index in range(8)}
    [answer], conv = classify([{"data": bytearray(encode_png(china))}], mapping=names)
    probabilities = expected(china, conv)
    order = np.argsort(-probabilities)[:5]
    assert list(answer) == [f"thing {index}" for index in order]
    assert list(answer.values()) == pytest.approx([probabilities[index] for index in order], abs=1e-5)


def test_classes_without_names_and_fewer_than_topk(classify: Any, china: Image.Image) -> None:
    [answer], conv = classify([{"body": encode_png(china)}], classes=3)
    assert sorted(answer) == ["0", "1", "2"] and sum(answer.values()) == pytest.approx(1)
    assert [answer[str(index)] for index in range(3)] == pytest.approx(list(expected(china, conv)), abs=1e-5)


def test_every_encoding_of_an_image_gives_the_same_values(classify: Any, china: Image.Image) -> None:
    content = encode_png(china)
    text = base64.encodebytes(content).decode()
    tensor = ImageClassifier.image_processing(china).tolist()
    rows = [{"data": content}, {"body": bytearray(content)}, {"body": text}, {"body": tensor}]
    answers, _ = classify([*rows, {"x": bytearray(text.encode()), "data": bytearray(text.encode())}])
    for answer in answers[1:]:
        assert list(answer) == list(answers[0])
        assert list(answer.values()) == pytest.approx(list(answers[0].values()), abs=1e-6)


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_grey_and_transparent_images_are_converted_to_rgb(classify: Any, mode: str) -> None:
    image = make_noise(300, 260, mode)
    [answer], conv = classify([{"body": encode_png(image)}], classes=2)
    assert [answer["0"], answer["1"]] == pytest.approx(list(expected(image, conv)), abs=1e-5)


@pytest.mark.timeout(120)  # a regular expression took hours for these
@pytest.mark.parametrize("content", [b" " * 2_000_000 + b"!", b"A" * 2_000_000 + b"=!", b"", b"QUJD" * 1000])
def test_what_is_nearly_base64_is_refused_at_once(classify: Any, content: bytes) -> None:
    [answer], _ = classify([{"data": content, "body": content}])
    assert isinstance(answer, PredictionException)


def test_transforms_are_those_of_torchserve_in_their_order() -> None:
    transforms = ImageClassifier.image_processing.transforms
    kinds = (Resize, CenterCrop, ToTensor, Normalize)
    assert all(isinstance(transform, kind) for transform, kind in zip(transforms, kinds, strict=True))
    rest = type(ImageClassifier.image_processing)(transforms[2:])
    assert rest(make_noise(8, 6, "RGB")).shape == (3, 6, 8)


def test_an_invalid_image_fails_alone(classify: Any, china: Image.Image) -> None:
    content = encode_png(china, "JPEG")
    invalid = {
        "not an image that can be read: image file is truncated": {"body": content[:2000]},
        "not an image that can be read: no known format begins with": {"body": b"GIF, really"},
        "not an image in base64": {"body": "no base64!"},
        "There is no image": {"name": "x"},
        "neither image nor JSON list of numbers: ": {"body": ["a"]},
        "a JSON object, and neither image nor JSON list of numbers. Send": {"body": {"pixels": [1]}},
        "a single number": {"body": True},
    }
    (answer, *errors), _ = classify([{"body": content}, *invalid.values()])
    assert len(answer) == 5
    for message, error in zip(invalid, errors):
        assert isinstance(error, PredictionException) and error.error_code == 400 and message in error.message


def test_a_subclass_may_set_topk_and_processing(classify: Any, china: Image.Image) -> None:
    source = """
    import numpy as np
    import torch
    from handlers.builtin.image_classifier import ImageClassifier

    class Plain(ImageClassifier):
        topk = 2

        def image_processing(self, image):
            return torch.from_numpy(np.array(image.resize((8, 8)))).permute(2, 0, 1) / 255
    """
    [answer], conv = classify([{"body": encode_png(china)}], source=source)
    pixels = np.array(china.resize((8, 8))).transpose(2, 0, 1) / 255
    logits = conv(torch.tensor(pixels, dtype=torch.float32)[None]).mean(dim=(2, 3))[0]
    probabilities, classes = torch.softmax(logits, 0).sort(descending=True)
    assert list(answer) == [str(index) for index in classes[:2].tolist()]
    assert list(answer.values()) == pytest.approx(probabilities[:2].tolist(), abs=1e-6)

    classifier = ImageClassifier()
    classifier.set_max_result_classes(3)
    assert classifier.get_max_result_classes() == 3 and ImageClassifier.topk == 5


@pytest.mark.parametrize("size", [(1, 2000), (20_000, 1), (1, 100_000), (300, 410_000), (10_000, 9000)])
def test_a_resize_bomb_fails_its_own_row(
    classify: Any, china: Image.Image, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """Resizing its shorter side to 256 pixels, or reading it, would need 300 MB to 25 GB."""
    allocated: list[int] = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image,
        "resize",
        lambda self, to, *rest: allocated.append(math.prod(to)) or resize(self, to, *rest),
    )
    bomb = encode_png(Image.new("1", size))
    (refused, answer), _ = classify([{"body": bomb}, {"body": encode_png(china, "JPEG")}])
    assert isinstance(refused, PredictionException) and refused.error_code == 400
    assert "too large" in refused.message
    assert len(answer) == 5 and max(allocated) < 2**18


@given(width=st.integers(1, 10**7), height=st.integers(1, 10**7), side=st.integers(1, 1024))
def test_resizing_enlarges_no_image_beyond_the_limit(width: int, height: int, side: int) -> None:
    for resize in (Resize(side), Resize((side, 2 * side))):
        try:
            to_width, to_height = resize.output_size((width, height))
        except PredictionException as error:
            assert error.error_code == 400 and "too large" in error.message
        else:
            # Pillow resizes the rows first, and then the columns.
            assert to_width * max(to_height, height) <= max(2**24, width * height)
            assert resize.size == side or (to_height, to_width) == resize.size


def test_images_of_usual_proportions_are_resized() -> None:
    for size in ((4000, 3000), (20_000, 500), (1, 1), (28, 28), (128, 30_000), (1, 64)):
        assert min(Resize(256).output_size(size)) == 256


def test_the_limit_holds_for_images_that_are_not_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow only warns of them."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300 * 300 - 1)
    warnings.simplefilter("ignore")
    with pytest.raises(PredictionException, match="it has 90000 pixels, and the limit is 89999"):
        check_image(encode_png(make_noise(300, 300)))


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("side", [12, 20])  # above the limit, and above twice the limit
def test_the_limit_on_pixels(
    archive: Any, begin: Any, monkeypatch: pytest.MonkeyPatch, side: int, limited: bool
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    warnings.simplefilter("ignore")  # as in a server; Pillow only warns of sizes up to twice the limit

    class Sum(VisionHandler):
        def postprocess(self, data: torch.Tensor) -> list[Any]:
            return [list(row.shape) for row in data]

    source = "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x"
    directory, manifest = archive(model=source), {"model": {"modelFile": "model.py"}}
    context = Context("m", str(directory), manifest, limit_max_image_pixels=limited)
    handler = Sum()
    handler.initialize(context)
    [answer] = handler.handle([{"body": encode_png(make_noise(side, side))}], begin(context))
    if limited:
        assert (
            answer.error_code == 400
            and "too large" in answer.message
            and "limit_max_image_pixels" in answer.message
        )
    else:
        assert answer == [3, side, side]
