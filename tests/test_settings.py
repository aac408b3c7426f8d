"""Numbers of the settings that have no meaning, which are refused at the start."""

from __future__ import annotations

import dataclasses
import math

import pytest

from serve_app.errors import ConfigurationError
from serve_app.settings import Settings, load

DEFAULTS = Settings()
NUMBERS = {
    f"{section.name}.{field.name}": getattr(getattr(DEFAULTS, section.name), field.name)
    for section in dataclasses.fields(DEFAULTS)
    if dataclasses.is_dataclass(getattr(DEFAULTS, section.name))
    for field in dataclasses.fields(getattr(DEFAULTS, section.name))
}
NUMBERS = {
    key: value
    for key, value in NUMBERS.items()
    if isinstance(value, (int, float)) and not isinstance(value, bool)
}


def load_number(key: str, value: float) -> None:
    section, _, name = key.partition(".")
    load({section: {name: value}})


@pytest.mark.parametrize("key", NUMBERS)
def test_a_negative_number_is_refused_by_its_name(key: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{key.replace('.', '.*')}\b.* -1\b"):
        load_number(key, -1)
    load_number(key, NUMBERS[key])


@pytest.mark.parametrize("key", [key for key, value in NUMBERS.items() if isinstance(value, float)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_is_finite(key: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=key.partition(".")[2]):
        load_number(key, value)


@pytest.mark.parametrize(
    "key",
    [
        *("store.download_timeout", "store.max_archive_bytes", "store.max_unpacked_bytes", "store.max_files"),
        *("runtime.default_response_timeout", "runtime.job_queue_size", "runtime.install_timeout"),
        *("control.acknowledge_timeout", "inference.max_request_size", "inference.gateways"),
        "telemetry.system_metrics_period",
    ],
)
def test_zero_is_refused_where_nothing_could_pass(key: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{key}: Input should be greater than .*\(got 0\)"):
        load_number(key, 0)
