"""Tests of settings: precedence of sources, errors, and secrets that are never shown."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamark.commands import reference
from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.settings.settings import FIELDS, Settings, make_flag_name, make_variable_name, redact_url
from seamark.metaserver.settings.sources import resolve_settings

NUMERIC_SETTINGS = ("requests_limit", "page_limit", "commit_retries", "timeline_keep", "drain_timeout_s")


def format_toml(values: dict[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


some_values = st.dictionaries(st.sampled_from(NUMERIC_SETTINGS), st.integers(1, 1000))


@given(flags=some_values, environment=some_values, file=some_values)
def test_setting_comes_from_flag_variable_file_or_default_in_this_order(
    tmp_path_factory: pytest.TempPathFactory, flags: dict[str, int], environment: dict[str, int], file: dict[str, int]
) -> None:
    config = tmp_path_factory.mktemp("config") / "seamark.toml"
    config.write_text(format_toml(file))
    variables = {make_variable_name(name): str(value) for name, value in environment.items()}
    settings = resolve_settings({name: str(value) for name, value in flags.items()}, variables, config)
    for name, field in FIELDS.items():
        expected = flags.get(name, environment.get(name, file.get(name, field.default)))
        assert getattr(settings, name) == expected, name


def test_configuration_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('host = "127.0.0.2"\nwebhook_urls = ["http://a/x", "https://b"]\ns3_path_style = false\n')
    settings = resolve_settings({}, {"SEAMARK_CONFIG": str(config)})
    assert settings.host == "127.0.0.2"
    assert settings.webhook_urls == ("http://a/x", "https://b")
    assert settings.s3_path_style is False


def test_list_in_a_variable_is_split_at_commas() -> None:
    settings = resolve_settings({}, {"SEAMARK_ALLOWED_LOCATIONS": "file:///a, s3://b/c"})
    assert settings.allowed_locations == ("file:///a", "s3://b/c")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("port", "abc", "a whole number"),
        ("port", "70000", "from 0 to 65535"),
        ("port", "-1", "from 0 to 65535"),
        ("workers", "0", "from 1 to 256"),
        ("auth", "basic", "one of none, token, oidc"),
        ("warehouse", "http://x", "file:// or s3:// or gs:// or abfss://"),
        ("database", "mysql://x", "sqlite:// or postgresql://"),
        ("storage_timeout_s", "nan", "a finite number"),
        ("storage_timeout_s", "soon", "a number"),
        ("s3_path_style", "maybe", "true or false"),
        ("log_level", "loud", "one of debug"),
        ("webhook_urls", "ftp://x", "http:// or https://"),
        ("body_limit_bytes", "1", "at least 1024"),
        ("host", "a\x00b", "text"),
    ],
)
def test_invalid_value_is_rejected_with_its_name_and_source(name: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_settings({}, {make_variable_name(name): value})
    assert name in error.value.message
    assert make_variable_name(name) in error.value.message
    assert expected in error.value.message
    with pytest.raises(ConfigError, match=make_flag_name(name)):
        resolve_settings({name: value}, {})


@given(name=st.sampled_from(sorted(FIELDS)), value=st.text() | st.integers() | st.floats() | st.booleans() | st.none())
def test_any_value_is_accepted_or_rejected_with_a_configuration_error(name: str, value: Any) -> None:
    try:
        settings = resolve_settings({name: value}, {})
    except ConfigError as error:
        assert name in error.message  # noqa: PT017
    else:
        assert isinstance(settings, Settings)


def test_error_does_not_repeat_a_secret() -> None:
    with pytest.raises(ConfigError) as error:
        resolve_settings({}, {"SEAMARK_DATABASE": "mysql://u:hunter2@h/d"})
    assert "hunter2" not in error.value.message


def test_unknown_key_of_the_file_is_rejected_with_the_nearest_known_one(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("prot = 1\n")
    with pytest.raises(ConfigError, match=r"c\.toml has an unknown key 'prot'; did you mean 'port'"):
        resolve_settings({}, {}, config)


def test_toml_table_in_the_file_is_rejected(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[server]\nport = 1\n")
    with pytest.raises(ConfigError, match=r"c\.toml has a table \[server\], but it can only have keys"):
        resolve_settings({}, {}, config)


@pytest.mark.parametrize(
    ("warehouse", "expected_location"),
    [
        ("/srv/lake", "file:///srv/lake"),
        ("file:/srv/lake", "file:///srv/lake"),
        ("./lake/", f"file://{Path.cwd()}/lake"),
        ("s3a://lake/warehouse", "s3://lake/warehouse"),
        ("oss://lake", None),
        ("s3:lake", None),
    ],
)
def test_invalid_warehouse_is_rejected_with_the_intended_url(warehouse: str, expected_location: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_settings({"warehouse": warehouse}, {})
    hint = "" if expected_location is None else f"; write {expected_location}"
    assert error.value.message.endswith(f"file:// or s3:// or gs:// or abfss:// or hdfs://; {warehouse!r} is not{hint}")
    if expected_location is not None:
        assert resolve_settings({"warehouse": expected_location}, {}).warehouse == expected_location


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe", b"[port]\nx = 1\n"])
def test_broken_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    config = tmp_path / "c.toml"
    config.write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.toml"):
        resolve_settings({}, {}, config)
    with pytest.raises(ConfigError, match="missing"):
        resolve_settings({}, {}, tmp_path / "missing")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"auth": "oidc"}, "oidc_issuer"),
        ({"s3_access_key_id": "a"}, "both or neither"),
        ({"s3_client_access": "static"}, "s3_secret_access_key"),
        ({"prefix": "a/b"}, "one path segment"),
        ({"peer_address": "10.0.0.5"}, "peer_address is '10.0.0.5'; write host:port"),
        ({"peer_address": "10.0.0.5:70000"}, "write host:port"),
        ({"peer_address": ":8183"}, "write host:port"),
        ({"peer_listen": "0.0.0.0:8183"}, "peer_listen needs peer_address"),
        ({"peer_address": "h:1", "peer_listen": "0.0.0.0"}, "peer_listen is '0.0.0.0'; write host:port"),
        ({"services_launchers": "local"}, "must contain worker"),
        ({"services_launchers": "worker,cluster"}, "set services_spark_master"),
        ({"services_launchers": "worker,yarn"}, "must be one of worker, local, cluster"),
        ({"services_local_memory_bytes": str(1 << 30)}, "services_local_memory_bytes"),
    ],
)
def test_contradictory_settings_are_rejected(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings(arguments, {})


def test_error_explains_the_variable_that_kubernetes_sets_for_a_service() -> None:
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        resolve_settings({}, {"SEAMARK_PORT": "tcp://10.0.0.1:8181"})


def test_shown_settings_contain_no_secret() -> None:
    settings = Settings(
        database="postgresql://u:hunter2@h/d?password=hunter2",
        s3_access_key_id="hunter2",
        s3_secret_access_key="hunter2",
        webhook_secret="hunter2",
        webhook_urls=("https://h/hunter2",),
        otel_endpoint="https://u:hunter2@h",
        warehouse_event_targets=("nats://u:hunter2@h/s", "nats://hunter2@h/s"),
        allowed_locations=("abfss://container@account.dfs.core.windows.net/",),
    )
    text = json.dumps(settings.redact())
    assert "hunter2" not in text
    assert "postgresql://u:***@h/d" in text
    assert "nats://***@h/s" in text
    assert "abfss://container@account.dfs.core.windows.net/" in text
    assert set(settings.redact()) == set(FIELDS)


@pytest.mark.parametrize(
    ("url", "shown_url"),
    [
        ("sqlite:////home/x.db", "sqlite:////home/x.db"),
        ("sqlite:///home/x.db", "sqlite:///home/x.db"),
        ("postgresql://u:p@h:1/d?sslmode=x", "postgresql://u:***@h:1/d"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("http://[broken", "***"),
    ],
)
def test_shown_url_omits_only_password_and_query(url: str, shown_url: str) -> None:
    assert redact_url(url) == shown_url


def test_every_setting_has_a_description_and_a_heading_on_the_reference_page() -> None:
    page = (reference.REFERENCE / "settings.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(FIELDS)
    for field in dataclasses.fields(Settings):
        assert field.metadata["description"].endswith("."), field.name


def test_reference_page_equals_the_generated_one() -> None:
    committed_text = (reference.REFERENCE / "settings.md").read_text()
    assert committed_text == reference.write_settings_page(), "run python -m seamark.commands.reference"
