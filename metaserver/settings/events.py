"""The settings of event targets, logs and traces, a part of the settings in `settings.py`."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class EventSettings:
    """The settings of event targets, logs and traces."""

    webhook_urls: tuple[str, ...] = setting(
        (),
        "URLs to which the server sends every instant as a CloudEvent (HTTP POST).",
        secret=True,
        schemes=("http", "https"),
    )
    webhook_secret: str = setting("", "Key with which the server signs webhook bodies (HMAC-SHA256).", secret=True)
    event_kafka: str = setting(
        "",
        "Apache Kafka topic to which the server sends every instant as a CloudEvent: "
        "kafka://host:port[,host:port]/topic. The topic must exist. If it is empty, the server sends no events to "
        "Kafka.",
        schemes=("kafka",),
    )
    event_kafka_client_properties: str = setting(
        "",
        "File with further properties of the Kafka client of event_kafka, such as those of TLS and SASL, one "
        "name=value on each line.",
    )
    event_nats: str = setting(
        "",
        "NATS JetStream subject to which the server sends every instant as a CloudEvent, such as "
        "nats://host:port/subject or tls://host:port/subject. The address can begin with user:password@, and can "
        "contain several servers separated by commas. A stream must capture the subjects subject.>. If it is empty, "
        "the server sends no events to NATS.",
        secret=True,
        schemes=("nats", "tls"),
    )

    openlineage_url: str = setting(
        "",
        "URL to which the server sends OpenLineage events of jobs and SQL statements (HTTP POST), such as "
        "https://marquez.example/api/v1/lineage. If it is empty, the server sends none.",
        secret=True,
        schemes=("http", "https"),
    )
    openlineage_api_key: str = setting(
        "", "Key that the server sends to openlineage_url as a bearer token.", secret=True
    )
    openlineage_namespace: str = setting("seamark", "Namespace of jobs in OpenLineage events.")

    log_level: str = setting(
        "info",
        "Least severe level of the messages that the server logs: debug, info, warning or error.",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = setting(
        "auto",
        "Format of the log: json, console, or auto (console on a terminal, otherwise json).",
        choices=("auto", "json", "console"),
    )
    otel_endpoint: str = setting(
        "",
        "OTLP/HTTP endpoint to which the server sends traces. If it is empty, it sends none.",
        schemes=("http", "https"),
    )
