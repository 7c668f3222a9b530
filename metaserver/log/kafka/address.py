"""Parses the address of a log in Kafka, and the properties of the client, without the client library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from seamark.formats.runtime.errors import BadRequest, ConfigError

SCHEME = "kafka://"
_PREFIX_CHARS_MAX = 100
"""The maximum length of the prefix of a server. Kafka accepts names of topics with up to 249 characters."""
_WAREHOUSE_CHARS = 33
"""The number of characters that the prefix of a further warehouse has more than the prefix of its server."""
_STREAM_CHARS_MAX = 100
_PORT_MAX = (1 << 16) - 1
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-")
_WAREHOUSE_SUFFIX = re.compile(r"\.[0-9a-f]{32}\Z")
"""Matches the end of the prefix of a further warehouse."""
_ALLOWED_PREFIXES = (
    "security.protocol",
    "sasl.",
    "ssl.",
    "socket.",
    "client.",
    "broker.address.",
    "compression.",
    "debug",
)
"""The prefixes of the Kafka client properties that an operator's file may set.

All other properties are set by the component that opens the client.
"""


@dataclass(frozen=True, kw_only=True)
class KafkaAddress:
    """The address of a log in a Kafka cluster.

    Attributes:
        servers: The addresses of the servers, as host:port separated by commas.
        prefix: The prefix of the names of all topics of the log.
        properties: Additional properties of the client, for example for TLS and SASL.
    """

    servers: str
    prefix: str
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def journal(self) -> str:
        """The topic of the journal."""
        return f"{self.prefix}.journal"

    def find_input_topic(self, stream: str) -> str:
        """Return the name of the topic to which other programs write rows of a stream."""
        return f"{self.prefix}.in.{stream}"

    def make_topic_name(self, stream: str) -> str:
        """Return the name of the topic of a stream.

        Raises:
            BadRequest: The name of the stream cannot be a part of the name of a topic.
        """
        if not _NAME_CHARS.issuperset(stream) or len(stream) > _STREAM_CHARS_MAX:
            raise BadRequest(f"The stream {stream!r} cannot be the name of a Kafka topic; use letters, digits, . and -")
        return f"{self.prefix}.rows.{stream}"


def parse_address(text: str, properties_file: str) -> KafkaAddress:
    """Parse the settings `stream_log` and `stream_log_client_properties`.

    Raises:
        ConfigError: A setting is invalid. The message names it.
    """
    servers, prefix = split_servers("stream_log", text, "kafka://host:port[,host:port]/prefix")
    # The server adds an id to its prefix for each further warehouse.
    characters_max = _PREFIX_CHARS_MAX + (_WAREHOUSE_CHARS if _WAREHOUSE_SUFFIX.search(prefix) else 0)
    if not prefix or len(prefix) > characters_max or not _NAME_CHARS.issuperset(prefix):
        raise ConfigError(
            f"stream_log has the prefix {prefix!r}; a prefix consists of 1 to {_PREFIX_CHARS_MAX} letters, digits, "
            ". and -; write for example kafka://host:9092/seamark"
        )
    properties = {}
    if properties_file:
        properties = read_properties("stream_log_client_properties", Path(properties_file), "the log")
    return KafkaAddress(servers=servers, prefix=prefix, properties=properties)


def split_servers(setting: str, text: str, form: str) -> tuple[str, str]:
    """Return the addresses of the servers in a URL of Kafka, and its path, which is not checked.

    Args:
        setting: The name of the setting with the URL, for the message.
        text: The URL.
        form: The form of a valid URL, for the message.

    Raises:
        ConfigError: The URL is invalid. The message names the setting.
    """
    servers, _, path = text.removeprefix(SCHEME).partition("/")
    if not text.startswith(SCHEME) or not all(_is_address(address) for address in servers.split(",")):
        raise ConfigError(f"{setting} is {text!r}; give {form}, or leave it empty")
    return servers, path


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= _PORT_MAX


def read_properties(setting: str, path: Path, owner: str) -> dict[str, str]:
    """Return the properties in a file with lines of the form name=value.

    Args:
        setting: The setting that names the file, for messages.
        path: The file.
        owner: The name of the component that sets all other properties, for messages.

    Raises:
        ConfigError: The file cannot be read, has a line of another form, or sets a property that the owner sets itself.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: the file {path} cannot be read: {error}") from None
    properties: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = (part.strip() for part in line.partition("="))
        if not separator:
            raise ConfigError(f"{setting}: line {number} of {path} is not name=value")
        if not name.startswith(_ALLOWED_PREFIXES):
            raise ConfigError(
                f"{setting}: {path} sets {name}, which {owner} sets itself; the file may have "
                f"properties that begin with {', '.join(_ALLOWED_PREFIXES)}"
            )
        properties[name] = value
    return properties
