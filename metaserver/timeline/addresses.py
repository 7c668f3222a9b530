"""The addresses of event targets in Kafka and NATS, which are parsed from settings without the client libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.log.kafka.address import read_properties, split_servers
from seamark.metaserver.settings.settings import redact_url

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_SUBJECT = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_SUBJECT_CHARS_MAX = 200


@dataclass(frozen=True, kw_only=True)
class EventTopic:
    """A topic of Kafka.

    Attributes:
        servers: The addresses host:port, separated by commas.
        topic: The name of the topic, which must exist.
        properties: Further properties of the client, for example for TLS and SASL.
    """

    servers: str
    topic: str
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EventSubject:
    """A subject of NATS.

    Attributes:
        servers: The URLs of the servers, which may contain a user and a password.
        subject: The beginning of the subjects of events.
        shown: The address for logs, without a password.
    """

    servers: tuple[str, ...] = field(repr=False)
    subject: str
    shown: str


def parse_topic(text: str, properties_file: str) -> EventTopic:
    """Parse the settings `event_kafka` and `event_kafka_client_properties`.

    Raises:
        ConfigError: A setting is invalid. The message names it.
    """
    servers, topic = split_servers("event_kafka", text, "kafka://host:port[,host:port]/topic")
    if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
        raise ConfigError(
            f"event_kafka has the topic {topic!r}; a topic must have 1 to 249 letters, digits, ., _ and -, such as "
            "kafka://host:9092/seamark-events"
        )
    properties = {}
    if properties_file:
        properties = read_properties("event_kafka_client_properties", Path(properties_file), "the server")
    return EventTopic(servers=servers, topic=topic, properties=properties)


def parse_subject(text: str) -> EventSubject:
    """Parse the setting `event_nats`.

    Raises:
        ConfigError: The setting is invalid. The message names it, without the password.
    """
    scheme, _, after_scheme = text.partition("://")
    authorities, _, subject = after_scheme.partition("/")
    servers = tuple(f"{scheme}://{authority}" for authority in authorities.split(","))
    if not all(_is_server(server) for server in servers):
        raise ConfigError("event_nats is invalid; write nats://[user:password@]host:port[,host:port]/subject")
    if not _SUBJECT.fullmatch(subject) or len(subject) > _SUBJECT_CHARS_MAX:
        raise ConfigError(
            f"event_nats has the subject {subject!r}; a subject must consist of words of letters, digits, _ and - with "
            f"dots between them, and have at most {_SUBJECT_CHARS_MAX} characters, such as nats://host:4222/seamark"
        )
    display_text = ",".join(redact_url(server) for server in servers)
    return EventSubject(servers=servers, subject=subject, shown=f"{display_text}/{subject}")


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("nats", "tls") and bool(parts.hostname and parts.port)
    except ValueError:
        return False
