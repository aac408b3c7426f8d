"""Keys: TorchServe's three in their file, the operator's own as digests, across crashes and new starts."""

from __future__ import annotations

import json
import stat
import time
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path

import pytest

from serve_app.control.access_keys import ApiKeys
from serve_app.domain.access import AccessTable, KeyGrant, KeyLimits
from serve_app.errors import ConfigurationError, InvalidToken, Unavailable
from serve_app.settings import AuthSettings, KeySettings, Settings, load
from tests.support.disk_calls import DiskCalls

EVERYTHING = frozenset({"infer", "observe", "manage"})


def settings(home: Path, *keys: KeySettings, **auth: object) -> Settings:
    return Settings(home=str(home), auth=AuthSettings(keys=keys, **auth))  # type: ignore[arg-type]


def in_file(home: Path) -> dict[str, dict[str, str]]:
    return json.loads((home / "key_file.json").read_text())


def grant(access: AccessTable, key: str) -> KeyGrant | None:
    return access.grants.get(sha256(key.encode()).digest())


def test_the_file_is_torchserves_and_its_owners_alone(tmp_path: Path) -> None:
    before = time.time()
    ApiKeys(settings(tmp_path, token_expiration=0.5), "run")
    result = in_file(tmp_path)
    assert list(result) == ["management", "inference", "API"]
    assert stat.S_IMODE((tmp_path / "key_file.json").stat().st_mode) == 0o600
    assert set(result["API"]) == {"key"}
    assert len({token["key"] for token in result.values()}) == 3
    for kind in ("management", "inference"):
        assert set(result[kind]) == {"key", "expiration time"}
        assert result[kind]["expiration time"].endswith("Z")
        expires = datetime.fromisoformat(result[kind]["expiration time"].replace("Z", "+00:00")).timestamp()
        assert before + 29.9 < expires < time.time() + 30.1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["key_file.json"]


def test_each_kind_grants_its_own_routes(tmp_path: Path) -> None:
    access = ApiKeys(settings(tmp_path), "run").access
    result = in_file(tmp_path)
    rights = {kind: grant(access, token["key"]).rights for kind, token in result.items()}  # type: ignore[union-attr]
    assert rights == {"management": {"observe", "manage"}, "inference": {"infer"}, "API": {"token"}}
    assert grant(access, result["API"]["key"]).expires is None  # type: ignore[union-attr]
    assert len(access.grants) == 3


def test_what_leaves_holds_no_key_and_shows_no_digest(tmp_path: Path) -> None:
    access = ApiKeys(settings(tmp_path), "run").access
    for token in in_file(tmp_path).values():
        assert token["key"].encode() not in b"".join(access.grants)
    assert repr(access) == "AccessTable()"


def test_the_settings_isolate_cached_prefixes(tmp_path: Path) -> None:
    plain = settings(tmp_path)
    isolated = replace(plain, auth=replace(plain.auth, isolate_prefix_cache=True))
    assert not ApiKeys(plain, "run").access.isolates_prefix_cache
    assert ApiKeys(isolated, "run").access.isolates_prefix_cache


@pytest.mark.parametrize("kind", ["inference", "management"])
def test_a_renewed_key_takes_the_place_of_the_old_one_alone(tmp_path: Path, kind: str) -> None:
    keys = ApiKeys(settings(tmp_path), "run")
    before = in_file(tmp_path)
    keys.renew(kind)
    after = in_file(tmp_path)
    assert {k for k in before if before[k] != after[k]} == {kind}
    assert grant(keys.access, before[kind]["key"]) is None
    assert grant(keys.access, after[kind]["key"]) is not None
    assert stat.S_IMODE((tmp_path / "key_file.json").stat().st_mode) == 0o600


def test_a_renewed_key_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ApiKeys(settings(tmp_path), "run")
    calls = DiskCalls.record(monkeypatch)
    keys.renew("management")
    calls.check_durable(tmp_path / "key_file.json")


def test_a_key_that_cannot_be_written_is_not_in_force(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    keys = ApiKeys(settings(home, key_file="keys/key_file.json"), "run")
    before = keys.access
    (home / "keys/key_file.json").unlink()
    (home / "keys").rmdir()
    (home / "keys").write_text("a file where the folder was")
    with pytest.raises(Unavailable, match="cannot be written"):
        keys.renew("inference")
    assert keys.access == before


def test_a_crash_keeps_the_keys_and_a_new_start_makes_new_ones(tmp_path: Path) -> None:
    first = ApiKeys(settings(tmp_path), "run 1")
    first.renew("management")
    assert ApiKeys(settings(tmp_path), "run 1").access == first.access
    second = ApiKeys(settings(tmp_path), "run 2")
    assert not set(second.access.grants) & set(first.access.grants)


@pytest.mark.parametrize(
    "result",
    [
        "",
        "{}",
        "[]",
        '{"management": {}, "inference": {}, "API": {}}',
        '{"management": {"key": "a"}, "inference": {"key": "b"}, "API": {"key": "c"}}',
        '{"management": {"key": "a", "expiration time": "soon"}, '
        '"inference": {"key": "b"}, "API": {"key": "c"}}',
    ],
)
def test_a_file_that_is_not_valid_is_written_anew(tmp_path: Path, result: str) -> None:
    ApiKeys(settings(tmp_path), "run")
    (tmp_path / "key_file.json").write_text(result)
    assert len(ApiKeys(settings(tmp_path), "run").access.grants) == 3
    assert set(in_file(tmp_path)) == {"management", "inference", "API"}


def test_torchserves_own_file_can_be_read(tmp_path: Path) -> None:
    """Its instants have nanoseconds."""
    ApiKeys(settings(tmp_path), "run")
    result = in_file(tmp_path)
    for kind in ("management", "inference"):
        result[kind]["expiration time"] = "2126-11-20T15:55:27.129771158Z"
    (tmp_path / "key_file.json").write_text(json.dumps(result))
    kept = ApiKeys(settings(tmp_path), "run").access
    assert grant(kept, result["inference"]["key"]).expires == pytest.approx(4950863727.129771, abs=1e-3)  # type: ignore[union-attr]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("")
    with pytest.raises(
        ConfigurationError, match=r"keys/key_file.json: cannot be written .*; make its folder writable"
    ):
        ApiKeys(settings(tmp_path, key_file="keys/key_file.json"), "run")


def test_own_keys_by_digest_and_by_variable(tmp_path: Path) -> None:
    keys = (
        KeySettings("ops", f"sha256:{sha256(b'one').hexdigest().upper()}", "manage"),
        KeySettings("team", "env:TEAM_KEY", "infer", ("team-*", "shared")),
        KeySettings("eye", f"sha256:{sha256(b'three').hexdigest()}", "observe", "team-*"),
    )
    access = ApiKeys(settings(tmp_path, *keys, torchserve_tokens=False), "run", {"TEAM_KEY": "two"}).access
    assert {digest.hex() for digest in access.grants} == {
        sha256(k).hexdigest() for k in (b"one", b"two", b"three")
    }
    assert grant(access, "one") == KeyGrant(EVERYTHING, name="ops")
    assert grant(access, "two") == KeyGrant(frozenset({"infer"}), ("team-*", "shared"), name="team")
    assert grant(access, "three") == KeyGrant(frozenset({"observe"}), ("team-*",), name="eye")
    assert not (tmp_path / "key_file.json").exists()


def test_without_torchserves_keys_there_is_none_to_renew(tmp_path: Path) -> None:
    own = KeySettings("ops", f"sha256:{sha256(b'one').hexdigest()}", "manage")
    with pytest.raises(InvalidToken):
        ApiKeys(settings(tmp_path, own, torchserve_tokens=False), "run").renew("inference")


@pytest.mark.parametrize(
    ("key", "environ", "cure"),
    [
        (
            "plain-and-secret",
            {},
            "a key does not stand here in plain text; write sha256: and the key's digest",
        ),
        ("sha256:secret", {}, "a key does not stand here in plain text"),
        ("env:", {}, "a key does not stand here in plain text"),
        ("", {}, "a key does not stand here in plain text"),
        ("env:NAME", {}, "the variable NAME must hold the key, which is one word; set it"),
        ("env:NAME", {"NAME": "two secret words"}, "the variable NAME must hold the key, which is one word"),
    ],
)
def test_an_own_key_that_is_wrong_is_named_and_not_shown(
    tmp_path: Path, key: str, environ: dict[str, str], cure: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ApiKeys(settings(tmp_path, KeySettings("ops", key)), "run", environ)
    assert str(caught.value).startswith("auth.keys, the key named 'ops': ")
    assert cure in str(caught.value)
    assert "secret" not in str(caught.value)


def test_one_key_has_one_entry(tmp_path: Path) -> None:
    digest = f"sha256:{sha256(b'one').hexdigest()}"
    with pytest.raises(ConfigurationError, match="the key named 'b' is there twice"):
        ApiKeys(settings(tmp_path, KeySettings("a", digest), KeySettings("b", digest)), "run")


def test_owners_have_names_that_outlive_their_keys(tmp_path: Path) -> None:
    nameless = KeySettings(key=f"sha256:{sha256(b'one').hexdigest()}")
    keys = ApiKeys(settings(tmp_path, nameless, default_limits=KeyLimits(concurrency=3)), "run")
    names = {grant.name for grant in keys.access.grants.values()}
    tokens = {"torchserve-management", "torchserve-inference", "torchserve-api"}
    assert names == tokens | {f"key-{sha256(b'one').hexdigest()[:12]}"}
    keys.renew("inference")
    assert {grant.name for grant in keys.access.grants.values()} == names
    assert {grant.limits for grant in keys.access.grants.values()} == {KeyLimits(concurrency=3)}


@pytest.mark.parametrize("name", ["a", "torchserve-inference", "jwt:me"])
def test_names_are_unique_and_not_reserved(tmp_path: Path, name: str) -> None:
    keys = (KeySettings(word, f"sha256:{sha256(word.encode()).hexdigest()}") for word in ("a", name + "x"))
    first, second = keys
    second = replace(second, name=name)
    with pytest.raises(ConfigurationError, match="rename"):
        ApiKeys(settings(tmp_path, first, second), "run")


@pytest.mark.parametrize("key", ["plain", {"name": "a", "key": 12345}, {"name": "a", "key": ["plain"]}])
def test_settings_that_are_wrong_show_no_key(key: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load({"auth": {"keys": [key]}})
    assert "plain" not in str(caught.value) and "12345" not in str(caught.value)


def test_a_misspelt_setting_of_a_key_is_named() -> None:
    with pytest.raises(
        ConfigurationError, match=r"unknown key 'auth.keys.0.modles'; did you mean 'models'\?"
    ):
        load({"auth": {"keys": [{"name": "a", "modles": "*"}]}})


@pytest.mark.parametrize(
    ("mode", "hosts", "wanted"),
    [
        ("auto", ("127.0.0.1",), False),
        ("auto", ("localhost",), False),
        ("auto", ("::1",), False),
        ("auto", ("0.0.0.0",), True),
        ("auto", ("::",), True),
        ("auto", ("server.example.com",), True),
        ("auto", ("127.0.0.1", "0.0.0.0"), True),
        ("on", ("127.0.0.1",), True),
        ("off", ("0.0.0.0",), False),
    ],
)
def test_keys_are_wanted_where_others_can_ask(mode: str, hosts: tuple[str, ...], wanted: bool) -> None:
    assert load({"auth": {"mode": mode}}).requires_keys(*hosts) is wanted


@pytest.mark.parametrize("setting", ["host", "metrics_host"])
def test_our_own_addresses_count_too(setting: str) -> None:
    assert load({"management": {setting: "192.0.2.1"}}).requires_keys("127.0.0.1")


def test_yaml_takes_on_and_off_for_truth_values() -> None:
    assert load({"auth": {"mode": False}}).auth.mode == "off"
    assert load({"auth": {"mode": True}}).auth.mode == "on"


def test_keys_that_nobody_could_have_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"requests need a key, and there is none; name keys in auth.keys"
    ):
        load({"auth": {"mode": "on", "torchserve_tokens": False}}).requires_keys("127.0.0.1")
