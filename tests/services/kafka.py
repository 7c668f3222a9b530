"""An Apache Kafka broker in one process, which is also its controller (KRaft). `make services` copies its jars."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tests.services.java import SHORT_LIVED, find_java_17
from tests.services.process import CACHE, ManagedProcess, ServiceFailed, choose_free_port

_CLUSTER_ID = "c2VhbWFyay10ZXN0cy0wMQ"
_DIRECTORY_ID = "c2VhbWFyay1mb2xkZXItMQ"
_LOGGING_CONFIG = """\
status = warn
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %c %m%n
"""


class Kafka:
    """A running Kafka broker."""

    def __init__(self, process: ManagedProcess, address: str) -> None:
        self.process = process
        self.address = address
        self._prefixes = itertools.count()

    def create_prefix(self) -> str:
        """Return a prefix of topics that no other test uses."""
        return f"t{next(self._prefixes)}"

    def is_answering(self) -> bool:
        """Return True if the broker serves requests."""
        with contextlib.suppress(KafkaException):
            client = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
            return bool(client.list_topics(timeout=1).brokers)
        return False

    def start(self) -> None:
        """Start the broker with its existing files, for example after `kill`."""
        self.process.start(self.is_answering, timeout_s=60)

    def kill(self) -> None:
        """End the broker with SIGKILL."""
        self.process.stop(first=signal.SIGKILL)


@contextmanager
def run_kafka_broker(
    folder: Path, *, host: str = "127.0.0.1", port: int | None = None, advertised_address: str = ""
) -> Iterator[Kafka]:
    """Start a broker, and yield it. Its files are below `folder`, and clients reach it at `host`.

    Args:
        folder: A new folder.
        host: The address on which the broker listens.
        port: Its port. By default it is a free port.
        advertised_address: The `host:port` that the broker gives to its clients, for example of a proxy.
    """
    jars = CACHE / "kafka"
    if not any(jars.glob("kafka_2.13-*.jar")):
        raise ServiceFailed("the jars of Kafka are not in .cache/kafka; run `make services`")
    data = folder / "data"
    data.mkdir(parents=True)
    # This formats the folder without kafka-storage.sh, which would start a second JVM.
    (data / "meta.properties").write_text(
        f"version=1\nnode.id=1\ncluster.id={_CLUSTER_ID}\ndirectory.id={_DIRECTORY_ID}\n"
    )
    port, controller_port = port or choose_free_port(), choose_free_port()
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://{host}:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{advertised_address or f'{host}:{port}'}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": str(data),
        "auto.create.topics.enable": "false",
        "group.initial.rebalance.delay.ms": "0",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "num.network.threads": "2",
        "num.io.threads": "4",
    }
    properties, logging_config = folder / "server.properties", folder / "log4j2.properties"
    properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    logging_config.write_text(_LOGGING_CONFIG)
    options = ["-Xmx512m", *SHORT_LIVED, f"-Dlog4j2.configurationFile={logging_config}", f"-Dkafka.logs.dir={folder}"]
    argv = [find_java_17(), *options, "-cp", f"{jars}/*", "kafka.Kafka", str(properties)]
    process = ManagedProcess(argv, log=folder / "kafka.log", cwd=folder)
    kafka = Kafka(process, f"{host}:{port}")
    kafka.start()
    try:
        yield kafka
    finally:
        kafka.kill()
