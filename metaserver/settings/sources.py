"""Read the settings from flags, environment variables and the TOML file, and check them."""

from __future__ import annotations

import difflib
import math
import os
import re
import stat
import tomllib
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seamark.formats.runtime.errors import ConfigError
from seamark.formats.storage.storages import LOCAL, find_rules
from seamark.metaserver.settings.fleet import split_address
from seamark.metaserver.settings.settings import FIELDS, Settings, make_flag_name, make_variable_name

CONFIG_VARIABLE = "SEAMARK_CONFIG"
"""The environment variable that names the TOML file if the flag `--config` does not."""
_LOCAL_BYTES_MIN = 3 << 30
"""The minimum memory limit of a job on PySpark: 1 GiB for each of the JVM, the driver and one task."""
_PATH_CHARACTERS_MAX = 200
_SHOWN_VALUE_CHARACTERS_MAX = 200
_ROLE_ARN = re.compile(r"arn:[a-z-]+:iam::[0-9]{12}:role/.+")
_UMASK = re.compile(r"(?:0?[0-7]{3})?")

_TYPES: dict[str, Any] = typing.get_type_hints(Settings)


def resolve_settings(flags: Mapping[str, Any], environment: Mapping[str, str], config: Path | None = None) -> Settings:
    """Return the settings from all sources.

    A flag has precedence over a variable, a variable over the TOML file, and the file over a default.

    Args:
        flags: Text, number, boolean or sequence by field name. None means that the flag is not set.
        environment: The environment variables.
        config: The TOML file. If it is None, the variable SEAMARK_CONFIG may name one.

    Raises:
        ConfigError: A value is invalid. The message names the setting and the source of the value.
    """
    if config is None and environment.get(CONFIG_VARIABLE):
        config = Path(environment[CONFIG_VARIABLE])
    values: dict[str, Any] = {}
    for name, value in (_read_toml(config) if config is not None else {}).items():
        values[name] = convert_setting(name, value, f"key {name!r} of {config}")
    for name in FIELDS:
        variable = make_variable_name(name)
        if variable in environment:
            values[name] = convert_setting(name, environment[variable], f"the variable {variable}")
        if flags.get(name) is not None:
            values[name] = convert_setting(name, flags[name], f"the flag {make_flag_name(name)}")
    settings = Settings(**values)
    check_consistency(settings)
    return settings


def find_exposed_secrets(environment: Mapping[str, str], config: Path | None = None) -> tuple[Path, list[str]] | None:
    """Return the TOML file and the names of the secrets in it if every account can read the file, otherwise None."""
    if config is None and environment.get(CONFIG_VARIABLE):
        config = Path(environment[CONFIG_VARIABLE])
    if config is None:
        return None
    names = [name for name in _read_toml(config) if FIELDS[name].metadata["secret"]]
    return (config, names) if names and config.stat().st_mode & stat.S_IROTH else None


def check_consistency(settings: Settings) -> None:
    """Check that settings which depend on each other do not contradict each other.

    Raises:
        ConfigError: Settings contradict each other. The message names them.
    """
    has_issuer = bool(settings.oidc_issuer)
    if "oidc" in settings.auth and (
        has_issuer != bool(settings.oidc_audience) or not (has_issuer or settings.oidc_issuers_file)
    ):
        raise ConfigError(
            f"auth = {settings.auth!r} needs oidc_issuer and oidc_audience: the issuer of the accepted tokens, and the "
            "audience that they must contain. For several issuers, set oidc_issuers_file"
        )
    if settings.openfga_url and settings.opa_url:
        raise ConfigError("opa_url and openfga_url name two policy servers: set one of them")
    if settings.openfga_url and not settings.openfga_store_id:
        raise ConfigError("openfga_url needs openfga_store_id, the id of the store with the relations: set it")
    if bool(settings.s3_access_key_id) != bool(settings.s3_secret_access_key):
        raise ConfigError("s3_access_key_id and s3_secret_access_key must be set together: set both or neither")
    if settings.s3_client_access == "static" and not settings.s3_access_key_id:
        raise ConfigError("s3_client_access = 'static' needs s3_access_key_id and s3_secret_access_key: set them")
    if settings.s3_client_access == "gateway" and not (settings.gateway_port or settings.gateway_url):
        raise ConfigError("s3_client_access = 'gateway' sends clients keys for the objects gateway: set gateway_port")
    if settings.s3_client_access == "sts" and not settings.s3_sts_role:
        raise ConfigError("s3_client_access = 'sts' sends clients keys of a role: set s3_sts_role")
    if settings.s3_sts_role and not _ROLE_ARN.fullmatch(settings.s3_sts_role):
        raise ConfigError(
            f"s3_sts_role must be the ARN of a role, arn:aws:iam::…:role/…; {settings.s3_sts_role!r} is not"
        )
    if urlsplit(settings.gateway_url).path.strip("/"):
        raise ConfigError(
            f"gateway_url must not have a path, because S3 clients would ignore it; it is {settings.gateway_url!r}"
        )
    if settings.s3_folder:
        if settings.s3_endpoint or settings.s3_access_key_id:
            raise ConfigError("s3_folder replaces an S3 store: leave s3_endpoint and s3_access_key_id empty")
        if not settings.s3_folder.startswith("/"):
            raise ConfigError(f"s3_folder must be an absolute path: {settings.s3_folder!r} is not")
        if settings.s3_client_access not in ("none", "gateway"):
            raise ConfigError(
                f"s3_folder has no keys and no signatures, so s3_client_access cannot be {settings.s3_client_access!r}"
            )
    if settings.s3_backend:
        if settings.s3_endpoint or settings.s3_access_key_id or settings.s3_folder:
            raise ConfigError(
                "s3_backend replaces an S3 store: leave s3_endpoint, s3_access_key_id and s3_folder empty"
            )
        if settings.s3_client_access not in ("none", "gateway"):
            raise ConfigError(
                f"s3_backend has no S3 keys, so s3_client_access cannot be {settings.s3_client_access!r}: set "
                "s3_client_access to gateway"
            )
    if settings.peer_address:
        split_address(settings.peer_address)
    if settings.peer_listen:
        if not settings.peer_address:
            raise ConfigError("peer_listen needs peer_address, at which other replicas reach this server: set it")
        split_address(settings.peer_listen, "peer_listen")
    if "worker" not in settings.services_launchers:
        raise ConfigError(
            "services_launchers must contain worker, which runs all jobs that do not rewrite data files: add it"
        )
    if "cluster" in settings.services_launchers and not settings.services_spark_master:
        raise ConfigError(
            "services_launchers contains cluster, which needs a Spark master: set services_spark_master, or remove "
            "cluster"
        )
    if 0 < settings.services_local_memory_bytes < _LOCAL_BYTES_MIN:
        raise ConfigError(
            f"services_local_memory_bytes is {settings.services_local_memory_bytes}, but a JVM, a driver and a task "
            f"need {_LOCAL_BYTES_MIN}: set at least that many, or 0 for no limit"
        )
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise ConfigError("tls_cert and tls_key must be set together: set both or neither")
    _check_client_certificates(settings)
    if not _UMASK.fullmatch(settings.warehouse_umask):
        raise ConfigError(f"warehouse_umask must be an octal number such as 022: {settings.warehouse_umask!r} is not")
    if "/" in settings.prefix or any(
        character.isspace() or not character.isprintable() for character in settings.prefix
    ):
        raise ConfigError(
            f"prefix must be one path segment without slashes, spaces and control characters; {settings.prefix!r} is "
            "not"
        )


def _check_client_certificates(settings: Settings) -> None:
    """Check that the settings of client certificates do not contradict each other.

    Raises:
        ConfigError: A setting needs another setting that is not set.
    """
    if "cert" in settings.auth and not settings.tls_client_ca:
        raise ConfigError(f"auth = {settings.auth!r} needs the authorities of client certificates: set tls_client_ca")
    if settings.tls_client_ca and not settings.tls_cert:
        raise ConfigError(
            "tls_client_ca needs tls_cert and tls_key: the server can check client certificates only on its own TLS "
            "connections"
        )
    if settings.tls_client_crl and not settings.tls_client_ca:
        raise ConfigError(
            "tls_client_crl has the revocation lists of the authorities in tls_client_ca: set tls_client_ca too"
        )
    if settings.tls_client_auth == "required" and not settings.tls_client_ca:
        raise ConfigError(
            "tls_client_auth = 'required' needs the authorities of client certificates: set tls_client_ca"
        )
    if settings.tls_client_rules_file and "cert" not in settings.auth:
        raise ConfigError(
            f"tls_client_rules_file maps certificates to logins, but auth = {settings.auth!r} accepts no certificates: "
            "add +cert"
        )


def _read_toml(path: Path) -> dict[str, Any]:
    """Read the TOML file, and check the names of its keys.

    Raises:
        ConfigError: The file cannot be read, or a key is invalid.
    """
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"Cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file {path} is not valid TOML: {error}") from None
    for name, value in table.items():
        if name not in FIELDS:
            if isinstance(value, dict):
                raise ConfigError(
                    f"The configuration file {path} has a table [{name}], but it can only have keys at the top level: "
                    "write the keys of the table there"
                )
            similar_names = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"; did you mean {similar_names[0]!r}?" if similar_names else "; `seamark serve --help` lists them"
            raise ConfigError(f"The configuration file {path} has an unknown key {name!r}{hint}")
    return table


def convert_setting(name: str, value: Any, source: str) -> Any:
    """Convert `value` to the type of the setting `name`, and check it. In a list, each item is checked.

    Args:
        name: The name of the setting.
        value: The value from the source.
        source: The source of the value, for messages, such as "the flag --port".

    Raises:
        ConfigError: The value has the wrong type or is outside the limits. The message names `source` and says what is
            valid.
    """

    def make_error(requirement: str, instead: str = "") -> ConfigError:
        secret = FIELDS[name].metadata["secret"]
        is_short = len(str(value)) < _SHOWN_VALUE_CHARACTERS_MAX
        shown_text = repr(value if is_short else str(value)[:_SHOWN_VALUE_CHARACTERS_MAX] + "…")
        shown_value = "the value given" if secret else shown_text
        hint = f"; write {instead}" if instead else ""
        if name in ("port", "host") and str(value).startswith("tcp://"):
            hint = " (Kubernetes sets this for a service called seamark: put `enableServiceLinks: false` in the pod)"
        return ConfigError(f"The setting {name}, from {source}, must be {requirement}; {shown_value} is not{hint}")

    converted_value = _CONVERTERS[_TYPES[name]](value, make_error)
    metadata = FIELDS[name].metadata
    for item in converted_value if isinstance(converted_value, tuple) else (converted_value,):
        if metadata["choices"] and item not in metadata["choices"]:
            raise make_error("one of " + ", ".join(metadata["choices"]))
        if metadata["schemes"] and item and item.partition("://")[0] not in metadata["schemes"]:
            allowed_form = "a URL that starts with " + " or ".join(f"{scheme}://" for scheme in metadata["schemes"])
            raise make_error(allowed_form, _suggest_location(item) if LOCAL in metadata["schemes"] else "")
        if metadata["pattern"] and item and not re.fullmatch(metadata["pattern"], item):
            raise make_error(f"a text that matches the regular expression {metadata['pattern']}")
        minimum, maximum = metadata["minimum"], metadata["maximum"]
        if (minimum is not None and item < minimum) or (maximum is not None and item > maximum):
            raise make_error(f"at least {minimum:g}" if maximum is None else f"from {minimum:g} to {maximum:g}")
    return converted_value


def _suggest_location(text: str) -> str:
    """Return the URL that a wrong location probably means, or an empty text.

    A scheme that another system uses for the same storage, such as s3a for S3, becomes the scheme of Seamark. A path,
    which may begin with `file:`, becomes an absolute file URL.
    """
    scheme, separator, after_scheme = text.partition("://")
    rules = find_rules(scheme)
    if rules is not None and scheme in rules.aliases:
        return f"{rules.scheme}://{after_scheme}"
    path = text.removeprefix("file:")
    is_path = not separator and ":" not in path and path.isprintable() and len(path) < _PATH_CHARACTERS_MAX
    return f"file://{os.path.abspath(path)}" if is_path else ""


MakeError = Callable[[str], ConfigError]
"""A function that returns the error for an invalid value. Its argument says what the value must be."""


def _parse_text(value: Any, make_error: MakeError) -> str:
    if not isinstance(value, str) or "\x00" in value:
        raise make_error("text")
    return value


def _parse_path(value: Any, make_error: MakeError) -> Path:
    if not isinstance(value, (str, Path)) or not str(value) or "\x00" in str(value):
        raise make_error("a path")
    return Path(value).expanduser()


def _parse_whole(value: Any, make_error: MakeError) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise make_error("a whole number") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise make_error("a whole number")
    return value


def _parse_number(value: Any, make_error: MakeError) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise make_error("a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise make_error("a number") from None
    if not math.isfinite(number):
        raise make_error("a finite number")
    return number


_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _parse_truth(value: Any, make_error: MakeError) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUTH:
        return _TRUTH[value.lower()]
    raise make_error("true or false")


def _parse_list(value: Any, make_error: MakeError) -> tuple[str, ...]:
    """Return the strings of a TOML array or of a repeated flag, or the parts of a text that are separated by commas.

    Empty parts are left out. Raise the error of `make_error` for other values.
    """
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, (list, tuple)):
        raise make_error("a list of strings")
    return tuple(_parse_text(item, make_error) for item in value)


_CONVERTERS: dict[Any, Callable[[Any, MakeError], Any]] = {
    str: _parse_text,
    Path: _parse_path,
    int: _parse_whole,
    float: _parse_number,
    bool: _parse_truth,
    tuple[str, ...]: _parse_list,
}
