"""Settings: keys of earlier versions."""

from __future__ import annotations

import pytest

from serve_app.domain.renamed_settings import RENAMED
from serve_app.errors import ConfigurationError
from serve_app.settings import Settings, load


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_a_renamed_key_is_refused_with_its_new_name(old: str) -> None:
    section, _, key = old.partition(".")
    with pytest.raises(ConfigurationError, match=f"{old} is now called {RENAMED[old]}; rename it"):
        load({section: {key: 1} if key else {}})


@pytest.mark.parametrize("new", sorted(set(RENAMED.values())))
def test_the_new_name_is_a_setting(new: str) -> None:
    value: object = Settings()
    for part in new.split("."):
        value = getattr(value, part)
