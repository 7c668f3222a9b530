"""A real S3 server: versitygw over a folder, or S3Proxy if only Java is available.

`make services` puts one of them into `.cache/`. Unlike a mock, both check signatures and support conditional puts. The
keys and the region come from `deploy/s3/versitygw.env`, which compose also uses.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import botocore.config
import botocore.session

from tests.services.java import SHORT_LIVED, find_java_17
from tests.services.process import (
    CACHE,
    DEPLOY,
    ManagedProcess,
    ServiceFailed,
    choose_free_port,
    is_http_ok,
    is_port_open,
)

CONFIG = DEPLOY / "s3" / "versitygw.env"


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables of a file with NAME=value lines, in the format of compose's env_file."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@cache
def _get_session() -> botocore.session.Session:
    """Return the session that all clients share.

    Reading the description of S3 takes a tenth of a second of CPU time.
    """
    return botocore.session.Session()


@dataclass
class S3:
    """A running S3 server.

    `root` is its folder. A test stops `process` to make the server fail.
    """

    endpoint: str
    access_key: str
    secret_key: str
    region: str
    root: Path
    process: ManagedProcess
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def client(self) -> Any:
        """Return a botocore client with path-style addresses and without retries: tests check the first answer."""
        return _get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=botocore.config.Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
        )

    def create_bucket(self, name: str = "") -> str:
        """Create an empty bucket, and return its name."""
        name = name or f"seamark-{next(self._numbers)}"
        client = self.client()
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name

    def build_seamark_env(self) -> dict[str, str]:
        """Return the `SEAMARK_…` variables with which a server uses this store."""
        return {
            "SEAMARK_S3_ENDPOINT": self.endpoint,
            "SEAMARK_S3_REGION": self.region,
            "SEAMARK_S3_ACCESS_KEY_ID": self.access_key,
            "SEAMARK_S3_SECRET_ACCESS_KEY": self.secret_key,
            "SEAMARK_S3_PATH_STYLE": "true",
        }

    def build_client_properties(self) -> dict[str, str]:
        """Return the catalog properties with which Spark's S3FileIO and PyIceberg connect directly to this store."""
        return {
            "s3.endpoint": self.endpoint,
            "s3.path-style-access": "true",
            "s3.access-key-id": self.access_key,
            "s3.secret-access-key": self.secret_key,
            "s3.region": self.region,
            "client.region": self.region,
        }


def manage_users(s3: S3, *arguments: str) -> None:
    """Run `versitygw admin` with arguments: `create-user` or `delete-user`."""
    binary = find_versitygw()
    if binary is None:
        raise ServiceFailed("versitygw is not installed; run `make services`")
    login = ("--access", s3.access_key, "--secret", s3.secret_key, "--endpoint-url", s3.endpoint, "--region", s3.region)
    command = [binary, "admin", *login, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode:
        raise ServiceFailed(f"versitygw admin {arguments[0]} failed: {result.stderr or result.stdout}")


def find_versitygw() -> str | None:
    go_binary = Path(os.environ.get("GOPATH", Path.home() / "go")) / "bin" / "versitygw"
    paths = [CACHE / "bin" / "versitygw", go_binary]
    return next((str(path) for path in paths if path.exists()), shutil.which("versitygw"))


def _build_versitygw(binary: str, root: Path, port: int, settings: dict[str, str], log: Path) -> ManagedProcess:
    env = {**settings, "VGW_PORT": f"127.0.0.1:{port}"}
    return ManagedProcess([binary, "posix", str(root)], log=log, env=env, cwd=root.parent)


def _build_s3proxy(root: Path, port: int, settings: dict[str, str], log: Path) -> ManagedProcess:
    """Return an S3Proxy server over the folder `root`, not yet started."""
    jars = CACHE / "s3proxy"
    if not any(jars.glob("s3proxy-*.jar")):
        raise ServiceFailed("no S3 server: neither versitygw nor .cache/s3proxy exists; run `make services`")
    properties_file = root.parent / "s3proxy.properties"
    settings_of_s3proxy = {
        "s3proxy.endpoint": f"http://127.0.0.1:{port}",
        "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": settings["ROOT_ACCESS_KEY"],
        "s3proxy.credential": settings["ROOT_SECRET_KEY"],
        "jclouds.provider": "filesystem-nio2",
        "jclouds.filesystem.basedir": str(root),
    }
    properties_file.write_text("".join(f"{key}={value}\n" for key, value in settings_of_s3proxy.items()))
    logging_config = root.parent / "logback.xml"
    logging_config.write_text(
        '<configuration><appender name="out" class="ch.qos.logback.core.ConsoleAppender"><encoder>'
        "<pattern>%d %level %logger %msg%n</pattern></encoder></appender>"
        '<root level="WARN"><appender-ref ref="out"/></root></configuration>'
    )
    argv = [
        find_java_17(),
        "-Xmx512m",
        *SHORT_LIVED,
        f"-Dlogback.configurationFile={logging_config}",
        "-cp",
        f"{jars}/*",
    ]
    return ManagedProcess(
        [*argv, "org.gaul.s3proxy.Main", "--properties", str(properties_file)], log=log, cwd=root.parent
    )


@contextmanager
def run_s3(folder: Path, *, keep_alive: bool = False, has_users: bool = False) -> Iterator[S3]:
    """Start an S3 server, and yield it. Its objects are below `folder`.

    The server is versitygw, or S3Proxy if versitygw is not installed. Create buckets with `create_bucket()`.

    Args:
        folder: The folder of the objects, the log and the users.
        keep_alive: Versitygw keeps connections open, like stores in the cloud. By default it does not.
        has_users: Versitygw accepts the keys of users that `manage_users` creates and deletes.
    """
    root = folder / "objects"
    root.mkdir(parents=True)
    settings, port, log = read_env_file(CONFIG), choose_free_port(), folder / "s3.log"
    if keep_alive:
        settings["VGW_KEEP_ALIVE"] = "true"
    if has_users:
        (folder / "users").mkdir()
        settings |= {"VGW_IAM_DIR": str(folder / "users"), "VGW_IAM_CACHE_DISABLE": "true"}
    endpoint, binary = f"http://127.0.0.1:{port}", find_versitygw()
    process = (
        _build_versitygw(binary, root, port, settings, log) if binary else _build_s3proxy(root, port, settings, log)
    )
    with process:
        health = f"{endpoint}{settings['VGW_HEALTH']}"
        process.start(lambda: is_http_ok(health) if binary else is_port_open(port), timeout_s=60)
        keys = settings["ROOT_ACCESS_KEY"], settings["ROOT_SECRET_KEY"]
        yield S3(endpoint, *keys, settings["VGW_REGION"], root, process)
