"""The settings of stream tables."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """The settings of stream tables."""

    stream_memory_bytes: int = setting(
        256 << 20,
        "Memory budget in bytes for the rows of stream tables that are not flushed. If more than a quarter of it is "
        "used, the server flushes the largest table at once. Writers of a table that has more bytes than the budget "
        "has free get 429.",
        minimum=1 << 20,
    )
    stream_flush_interval_ms: int = setting(
        10_000,
        "Age in milliseconds of a stream table's oldest row at which the table's rows are flushed into data files. "
        "The table property seamark.stream.flush-interval-ms overrides it.",
        minimum=100,
        maximum=86_400_000,
    )
    stream_fresh_interval_ms: int = setting(
        100,
        "Shortest time in milliseconds between two writes of fresh files of a stream table. A reader that comes "
        "earlier waits for the next write.",
        minimum=0,
        maximum=60_000,
    )
    stream_fresh_retention_s: int = setting(
        3600,
        "Seconds for which fresh files still exist after the last plan that may name them, for queries that are "
        "running.",
        minimum=1,
    )
    stream_rows_limit: int = setting(
        100_000, "Maximum number of rows in a request to a stream table.", minimum=1, maximum=1 << 24
    )
    stream_log: str = setting(
        "",
        "Log of stream tables. If it is empty, the log is in files in the home folder, for one server with one "
        "worker. With kafka://host:port[,host:port]/prefix, it is in Apache Kafka topics whose names begin with the "
        "prefix, for all workers and replicas.",
    )
    stream_log_client_properties: str = setting(
        "",
        "File with further properties of the Kafka client, such as those of TLS (security.protocol, ssl.ca.location) "
        "and SASL (sasl.mechanism, sasl.username, sasl.password), one name=value on each line. The names are those of "
        "librdkafka.",
    )
    stream_log_retention_s: int = setting(
        7 * 86_400,
        "Age in seconds at which the log removes rows of stream tables that are in data files. It never removes rows "
        "that are in no data file.",
        minimum=60,
    )
    stream_log_retention_bytes: int = setting(
        64 << 30,
        "Size in bytes of the log above which it removes rows that are in data files, even if they are younger than "
        "stream_log_retention_s.",
        minimum=64 << 20,
    )
    stream_log_waiting_bytes: int = setting(
        256 << 20,
        "Maximum number of bytes of rows that wait to be written to the disk of the log or to Kafka. Above it, "
        "writers get 429.",
        minimum=1 << 20,
    )
    stream_log_producers_limit: int = setting(
        50_000,
        "Maximum number of producer names that the log remembers. It forgets a name when stream_log_retention_s has "
        "passed since the producer's last rows. Above the maximum, new names get 429. A principal cannot use more "
        "names than remain free, so it gets at most half of them. Each partition of an input topic also uses a name, "
        "until its table is dropped, or for stream_log_retention_s after another topic has replaced the topic. The "
        "names of all input topics together count as those of one principal.",
        minimum=1,
    )
