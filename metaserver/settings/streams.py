"""Settings of stream tables."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    stream_memory_bytes: int = setting(
        256 << 20,
        "Memory for rows of stream tables that are not flushed. From a quarter of it on, the largest table is flushed "
        "at once. Writers of a table that has more bytes than are free get 429.",
        minimum=1 << 20,
    )
    stream_flush_interval_ms: int = setting(
        10_000,
        "Age of the oldest row of a stream table at which its rows are flushed into data files. The table property "
        "seamark.stream.flush-interval-ms overrides it.",
        minimum=100,
        maximum=86_400_000,
    )
    stream_fresh_interval_ms: int = setting(
        100,
        "The shortest time between two writes of fresh files of a stream table. A reader that comes earlier waits for "
        "the next write.",
        minimum=0,
        maximum=60_000,
    )
    stream_fresh_retention_s: int = setting(
        3600,
        "Seconds that fresh files stay after the last plan that may name them, for running queries.",
        minimum=1,
    )
    stream_rows_limit: int = setting(100_000, "Rows of one request to a stream table.", minimum=1, maximum=1 << 24)
    stream_log: str = setting(
        "",
        "The log of stream tables. Empty: files in the home folder, for one server with one worker. "
        "kafka://host:port[,host:port]/prefix: topics of Apache Kafka whose names begin with the prefix, for all "
        "workers and replicas.",
    )
    stream_log_client_properties: str = setting(
        "",
        "A file with further properties of the Kafka client, one name=value on each line, such as those of TLS "
        "(security.protocol, ssl.ca.location) and SASL (sasl.mechanism, sasl.username, sasl.password). The names are "
        "those of librdkafka.",
    )
    stream_log_retention_s: int = setting(
        7 * 86_400,
        "Age in seconds at which the log removes rows of stream tables that are in data files. Rows that are in no "
        "data file stay.",
        minimum=60,
    )
    stream_log_retention_bytes: int = setting(
        64 << 30,
        "Size of the log above which it removes rows that are in data files before they have the age of "
        "stream_log_retention_s.",
        minimum=64 << 20,
    )
    stream_log_waiting_bytes: int = setting(
        256 << 20,
        "Bytes of rows that wait for the disk of the log or for Kafka. Beyond it writers get 429.",
        minimum=1 << 20,
    )
    stream_log_producers_limit: int = setting(
        50_000,
        "Names of producers that the log remembers, each for the age of stream_log_retention_s after its last rows. "
        "New names beyond it get 429. One principal has at most as many names as stay free, so at most half of them. "
        "Each partition of an input topic takes a name until its table is dropped, or until another topic has replaced "
        "the topic for that age. All of them count as the names of one principal.",
        minimum=1,
    )
