"""The translator of a config.properties to settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from serve_app.domain.validation import did_you_mean
from serve_app.errors import ConfigurationError
from serve_app.settings import Settings, VersionSettings, load
from serve_app.torchserve_config import lenient_json
from serve_app.torchserve_config.keys import (
    BY_NAME,
    GPU_SHARE,
    KEYS,
    MANNERS,
    ConfigKey,
    Fate,
    denied,
    flag,
    load_models,
    tokens,
)
from serve_app.torchserve_config.parser import ConfigEntry, parse, substitute_variables


@dataclass(frozen=True)
class ListenAddress:
    """Where an API listens; an address without a certificate is plain HTTP."""

    host: str
    port: int
    secure: bool = False


@dataclass(frozen=True)
class TranslationNote:
    """The result for one key of the file."""

    key: str
    value: str
    fate: Fate
    becomes: str  # the setting that it is now, or the reason why it is none
    remark: str = ""


@dataclass(frozen=True)
class TranslatedConfig:
    """The translation of a config.properties."""

    args: Mapping[str, Mapping[str, Any]]  # of an app.yaml; only what differs from our own defaults
    inference: ListenAddress
    certificate_file: str = ""  # of the inference port, where that is secure
    private_key_file: str = ""
    notes: tuple[TranslationNote, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def settings(self) -> Settings:
        return load(self.args)


def read(
    text: str,
    where: str = "config.properties",
    environment: Mapping[str, str] | None = None,
    command: Mapping[str, tuple[str, str]] | None = None,
    gpus: int = 0,
) -> TranslatedConfig:
    """Translate a config.properties; the environment and the command line take precedence.

    ``command`` has a key's value and the option that set it: ``{"model_store": ("m", "--model-store")}``;
    ``gpus`` is the number of this machine. Raises ConfigurationError with key, place and remedy.
    """
    environment = environment or {}
    entries = substitute_variables(parse(text, where), environment, where)
    entries.update({key: ConfigEntry(value, option) for key, (value, option) in (command or {}).items()})
    warnings = []
    unread = []
    unset = ConfigEntry("", "")
    enabled = flag(entries.get("enable_envvars_config", unset).value.strip())
    urls_too = flag(entries.get("use_env_allowed_urls", unset).value.strip())
    for key in KEYS:
        if key.variable and key.variable in environment:
            if enabled and (key.name != "allowed_urls" or urls_too):
                entries[key.name] = ConfigEntry(environment[key.variable], f"the variable {key.variable}")
            else:
                wants = "use_env_allowed_urls=true" if enabled else "enable_envvars_config=true"
                unread.append(f"{key.variable} (wants {wants})")
    if unread:
        warnings.append(f"{where}: variables of the environment that are not read: {', '.join(unread)}")
    stripped = {key: entry._replace(value=entry.value.strip()) for key, entry in entries.items()}
    effective_entries = {key: entry for key, entry in stripped.items() if entry.value}
    return _ConfigTranslator(where, effective_entries, warnings).translate(gpus)


class _ConfigTranslator:
    """The translation of one file, in progress."""

    def __init__(self, where: str, effective_entries: Mapping[str, ConfigEntry], warnings: list[str]) -> None:
        self._where = where
        self._entries = effective_entries
        self._warnings = warnings
        self._settings: dict[str, Any] = dict(MANNERS)
        self._remarks: dict[str, str] = {}

    def translate(self, gpus: int) -> TranslatedConfig:
        for key in KEYS:
            if key.parse is not None and (value := self._value(key)) is not None and key.fate == "setting":
                self._settings[key.becomes.strip("`")] = value
        if "allowed_urls" not in self._entries:
            del self._settings["store.allowed_urls"]
        number_of_gpu = self._settings.pop("runtime.num_gpus", None)
        if gpus and number_of_gpu != 0:
            self._settings["runtime.num_gpus"] = GPU_SHARE
        self._models()
        inference, secure = self._listeners()
        self._unknown()
        for key in KEYS:
            if key.fate == "unserved" and self._get(key.name) != key.default:
                place = self._place(key.name)
                self._warnings.append(f"{self._where}: {place}: {key.name} is not served: {key.becomes}")
        return TranslatedConfig(
            args=_differences(self._settings),
            inference=inference,
            certificate_file=self._get("certificate_file") if secure else "",
            private_key_file=self._get("private_key_file") if secure else "",
            notes=tuple(self._notes()),
            warnings=tuple(self._warnings),
        )

    def _get(self, name: str) -> str:
        return self._entries[name].value if name in self._entries else BY_NAME[name].default

    def _place(self, name: str) -> str:
        return self._entries[name].place if name in self._entries else "default"

    def _refuse(self, name: str, what: str) -> ConfigurationError:
        return ConfigurationError(self._where, f"{self._place(name)}: {name}: {what}")

    def _value(self, key: ConfigKey) -> Any:
        """Return a key's parsed value; None where it is not set."""
        text = self._get(key.name)
        if not text:
            return None
        assert key.parse is not None
        if key.parse in (flag, denied, tokens) and text.lower() not in ("true", "false"):
            self._remarks[key.name] = f"{text!r} counts as false, as it does for TorchServe"
        try:
            return key.parse(text)
        except ValueError as error:
            raise self._refuse(key.name, f"{text!r} must be {error}") from None

    # Models

    def _models(self) -> None:
        self._settings["control.load_models"] = load_models(self._get("load_models"))
        models = self._versions("models", self._json("models"))
        snapshot = self._json("model_snapshot")
        if snapshot:
            inner = snapshot.get("models")
            if not isinstance(inner, dict):
                raise self._refuse("model_snapshot", 'has no object "models"; take it from a snapshot, whole')
            restored = self._versions("model_snapshot", inner)
            for model, versions in restored.items():
                models[model] = {**models.get(model, {}), **versions}
            archives = [
                f"{model}={archive}"
                for model, versions in inner.items()
                for version in versions.values()
                if (archive := version.get("marName"))
            ]
            if "load_models" in self._entries:
                self._remarks["load_models"] = "ignored, as by TorchServe with a model_snapshot"
            self._settings["control.load_models"] = ",".join(archives) or "none"
        if models:
            self._settings["control.models"] = models

    def _json(self, name: str) -> dict[str, Any]:
        text = self._get(name)
        if not text:
            return {}
        try:
            value = lenient_json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._refuse(
                name, f"is not JSON ({error}); end every line of it but the last with a backslash"
            ) from None
        if not isinstance(value, dict):
            raise self._refuse(name, f"holds a {type(value).__name__} and must be an object of models")
        return value

    def _versions(self, name: str, models: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
        """``control.models`` from TorchServe's object of models."""
        made: dict[str, dict[str, dict[str, Any]]] = {}
        for model, versions in models.items():
            if not isinstance(versions, dict):
                raise self._refuse(
                    name, f'model {model!r} must be an object of versions, such as {{"1.0": {{…}}}}'
                )
            for version, values in versions.items():
                if not isinstance(values, dict):
                    raise self._refuse(
                        name, f"model {model!r}, version {version!r} must be an object of values"
                    )
                made.setdefault(model, {})[version] = self._version(name, f"{model} {version}", values)
        return made

    def _version(self, name: str, which: str, values: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in values.items():
            if key in _VERSION_NUMBERS:
                number = lenient_json.to_int(value)
                if number is None:
                    self._warn_of_value(name, which, key, value, "a whole number")
                elif number > 0 or (number == 0 and key == "minWorkers" and name == "model_snapshot"):
                    made[_VERSION_NUMBERS[key]] = number  # other numbers say nothing, as for TorchServe
            elif key == "defaultVersion":
                is_default = lenient_json.to_bool(value)
                if is_default is None:
                    self._warn_of_value(name, which, key, value, "true or false")
                elif is_default:
                    made["default_version"] = True
            elif key not in _VERSION_OTHERS:
                near = did_you_mean(key, [*_VERSION_NUMBERS, *_VERSION_OTHERS])
                self._warnings.append(
                    f"{self._where}: {self._place(name)}: {name}: {which}: unknown key {key!r}"
                    + (f"; did you mean {near!r}?" if near else "")
                )
        low, high = made.get("min_workers"), made.get("max_workers")
        if low is not None and high is not None and low > high:
            raise self._refuse(
                name, f"{which}: minWorkers {low} is more than maxWorkers {high}; change one of them"
            )
        return made

    def _warn_of_value(self, name: str, which: str, key: str, value: Any, expected: str) -> None:
        """Warn of a value in whose place the default counts, as for TorchServe."""
        place = f"{self._where}: {self._place(name)}: {name}: {which}"
        self._warnings.append(f"{place}: {key}: {value!r} is ignored, it must be {expected}")

    # Addresses

    def _listeners(self) -> tuple[ListenAddress, bool]:
        """Set the addresses of the three APIs; return the inference port, and whether it is secure."""
        names = ("inference_address", "management_address", "metrics_address")
        inference, management, metrics = listeners = tuple(self._listener(name) for name in names)
        for (first, one), (second, other) in combinations(zip(names, listeners, strict=True), 2):
            if one != other and one.port == other.port:
                raise self._refuse(
                    second,
                    f"{self._get(second)} has the port of {first}, {self._get(first)}: "
                    "write the same address in both, or another port in one",
                )
        settings = self._settings
        if management == inference:
            settings["inference.serve_management"], settings["management.port"] = True, 0
            self._remarks["management_address"] = "on the inference port: `inference.serve_management`"
        else:
            settings["management.host"], settings["management.port"] = management.host, management.port
        if metrics == inference:
            settings["inference.serve_metrics"], settings["management.metrics_port"] = True, 0
            self._remarks["metrics_address"] = "on the inference port: `inference.serve_metrics`"
        elif metrics == management:
            settings["management.serve_metrics"], settings["management.metrics_port"] = True, 0
            self._remarks["metrics_address"] = "on the management port: `management.serve_metrics`"
        else:
            settings["management.metrics_host"] = metrics.host
            settings["management.metrics_port"] = metrics.port
        self._certificates(dict(zip(names, listeners)))
        return inference, inference.secure

    def _listener(self, name: str) -> ListenAddress:
        address = self._get(name)
        if address.lower().startswith("unix:"):
            remedy = "write http://127.0.0.1 and a port; only this machine reaches it"
            raise self._refuse(name, f"{address}: Unix sockets are not supported; {remedy}")
        match = re.fullmatch(r"(https?)://(\[[0-9a-fA-F:.]+\]|[^:/\s]+)(?::(\d+))?/?", address, re.IGNORECASE)
        if match is None:
            raise self._refuse(name, f"{address!r} is not an address; write one as http://127.0.0.1:8080")
        secure = match[1].lower() == "https"
        port = int(match[3]) if match[3] else _PORTS[name][secure]
        if not 0 < port < 65536:
            raise self._refuse(name, f"{port} is not a port: ports are 1 to 65535")
        return ListenAddress(match[2].strip("[]"), port, secure)

    def _certificates(self, listeners: Mapping[str, ListenAddress]) -> None:
        pair = "certificate_file", "private_key_file"
        there = [name for name in pair if self._get(name)]
        secure = [name for name, listener in listeners.items() if listener.secure]
        if len(there) == 1:
            missing = next(name for name in pair if name not in there)
            raise self._refuse(there[0], f"is set alone; set the other PEM file with {missing}")
        over_grpc = flag(self._get("enable_grpc_ssl"))
        if (secure or over_grpc) and not there:
            if self._get("keystore"):
                raise self._refuse("keystore", _from_keystore(self._get("keystore")))
            key, value = (secure[0], "https") if secure else ("enable_grpc_ssl", "true")
            raise self._refuse(key, f"{value} requires certificate_file and private_key_file; {_MAKE_PAIR}")
        if over_grpc:
            for name in pair:
                self._settings[f"grpc.{name}"] = self._get(name)
        if there and not secure and not over_grpc:
            for name in there:
                self._remarks[name] = "no address is https, so it is not read"
        if self._get("keystore") and there:
            self._remarks["keystore"] = "the pair of PEM files is read in its place"
        ours = {listeners["management_address"].secure, listeners["metrics_address"].secure}
        inference = listeners["inference_address"]
        own = [name for name in ("management_address", "metrics_address") if listeners[name] != inference]
        if len(own) == 2 and len(ours) == 2:
            raise self._refuse(
                "metrics_address",
                f"{self._get('metrics_address')} and management_address, {self._get('management_address')},"
                " must both be https or both be http: they are served by one process with one certificate",
            )
        if any(listeners[name].secure for name in own):
            for name in pair:
                self._settings[f"management.{name}"] = self._get(name)

    # Notes and warnings

    def _unknown(self) -> None:
        unknown = []
        for name, entry in self._entries.items():
            if name not in BY_NAME:
                near = did_you_mean(name, list(BY_NAME))
                unknown.append(f"{name} ({entry.place}" + (f"; did you mean {near}?)" if near else ")"))
        if unknown:
            self._warnings.append(f"{self._where}: unknown keys, which do nothing: {', '.join(unknown)}")

    def _notes(self) -> Iterator[TranslationNote]:
        for name, entry in self._entries.items():
            if (key := BY_NAME.get(name)) is not None:
                yield TranslationNote(
                    name, entry.value, key.fate, key.becomes, self._remarks.get(name, key.remark)
                )


_PORTS = {"inference_address": (80, 443), "management_address": (8081, 8444), "metrics_address": (8082, 8445)}

_VERSION_NUMBERS = {
    "minWorkers": "min_workers",
    "maxWorkers": "max_workers",
    "batchSize": "batch_size",
    "maxBatchDelay": "max_batch_delay",
    "responseTimeout": "response_timeout",
    "startupTimeout": "startup_timeout",
}
_VERSION_OTHERS = ("defaultVersion", "marName", "runtimeType", "parallelLevel", "parallelType")

_MAKE_PAIR = (
    "make a pair for yourself with `openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=localhost "
    "-keyout key.pem -out certificate.pem`"
)


def _from_keystore(path: str) -> str:
    make = f"openssl pkcs12 -in {path} -nodes"
    return (
        "is not read; write its contents to two files with "
        f"`{make} -nokeys -out certificate.pem` and `{make} -nocerts -out key.pem`, "
        "and name them with certificate_file and private_key_file in its place"
    )


def _differences(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings that differ from their defaults, nested as in an app.yaml."""
    defaults = Settings()
    nested: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, name = path.split(".")
        default = getattr(getattr(defaults, section), name)
        if value != (list(default) if isinstance(default, tuple) else default):
            nested.setdefault(section, {})[name] = value
    return nested


assert {field.name for field in dataclasses.fields(VersionSettings)} == {
    *_VERSION_NUMBERS.values(),
    "default_version",
}
