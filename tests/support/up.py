"""The services of docker-compose.yml without containers: `make up`, or `python -m tests.support.up`.

Starts PostgreSQL, an S3 server and Seamark on loopback, and on request Apache Kafka and Trino, from what `make
services` and `make trino` have fetched, and with the files in `deploy/` that compose mounts. They run until Ctrl-C, and
their data ends with them.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from tests.services.kafka import run_kafka_broker
from tests.services.postgres import postgres_server
from tests.services.process import DEPLOY, ManagedProcess, ServiceFailed, choose_free_port, is_http_ok
from tests.services.s3 import S3, run_s3
from tests.services.seamark import Seamark

BUCKET = "lake"


@contextmanager
def run_trino_over(seamark: Seamark, s3: S3, folder: Path, port: int) -> Iterator[str]:
    """Start Trino with deploy/trino/run.sh, and yield its URL."""
    environment = {
        "SEAMARK_URI": seamark.base_url,
        "TRINO_PORT": str(port),
        "TRINO_DATA": str(folder / "data"),
        "S3_ENDPOINT": s3.endpoint,
        "S3_REGION": s3.region,
        "S3_ACCESS_KEY": s3.access_key,
        "S3_SECRET_KEY": s3.secret_key,
    }
    folder.mkdir()
    url = f"http://127.0.0.1:{port}"
    with ManagedProcess([str(DEPLOY / "trino" / "run.sh")], log=folder / "trino.log", env=environment) as process:
        process.start(lambda: is_http_ok(f"{url}/v1/info", contains='"starting":false'), timeout_s=180)
        yield url


@click.command()
@click.option("--port", default=8181, show_default=True, help="Port of Seamark; 0 selects a free port.")
@click.option("--kafka", is_flag=True, help="Keep the log of stream tables in Apache Kafka.")
@click.option("--trino", is_flag=True, help="Start Trino; needs `make trino` and a JDK 25.")
def run_services(port: int, kafka: bool, trino: bool) -> None:
    """Start the services, print their addresses, and run until Ctrl-C."""
    end_event = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end_event.set())
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seamark-up-")))
            database = stack.enter_context(postgres_server()).create_database("seamark")
            s3 = stack.enter_context(run_s3(folder / "s3"))
            s3.create_bucket(BUCKET)
            environment = {**s3.build_seamark_env(), "SEAMARK_SERVICES_WORKERS": "1"}
            addresses = [("PostgreSQL", database), ("S3", f"{s3.endpoint}, keys in deploy/s3/versitygw.env")]
            if kafka:
                broker = stack.enter_context(run_kafka_broker(folder / "kafka"))
                environment["SEAMARK_STREAM_LOG"] = f"kafka://{broker.address}/seamark"
                addresses.append(("Kafka", broker.address))
            server = Seamark(
                folder / "home",
                warehouse=f"s3://{BUCKET}/warehouse",
                database=database,
                env=environment,
                port=port or choose_free_port(),
            )
            stack.enter_context(server)
            addresses.append(("Seamark", server.base_url))
            if trino:
                addresses.append(
                    ("Trino", stack.enter_context(run_trino_over(server, s3, folder / "trino", choose_free_port())))
                )
            for name, address in addresses:
                click.echo(f"{name:<11} {address}")
            click.echo(f"Ready. Ctrl-C ends the services and removes their data. Logs: {folder}")
            end_event.wait()
    except ServiceFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    run_services()
