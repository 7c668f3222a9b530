"""A server with the objects gateway before a real S3 server or a local folder, and clients with vended credentials."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pyarrow as pa
import pyarrow.fs
import s3fs
from botocore.config import Config
from obstore.store import S3Store

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.gateway.sigv4 import RequestTarget, sign_headers
from seamark.metaserver.objects.s3_scope import UNSIGNED_PAYLOAD
from tests.services.process import choose_free_port
from tests.services.s3 import S3
from tests.services.seamark import Seamark

SCHEMA = {"type": "struct", "schema-id": 0, "fields": [{"id": 1, "name": "id", "required": False, "type": "long"}]}


@dataclass(frozen=True)
class Keys:
    """The credentials of a table, and the location of its objects."""

    endpoint: str
    region: str
    access_key: str
    secret: str
    token: str
    bucket: str
    prefix: str
    """The prefix of the table's keys, with a slash at its end."""

    def sign(
        self, method: str, name: str, payload: str = UNSIGNED_PAYLOAD, query: str = "", **headers: str
    ) -> tuple[str, dict[str, str]]:
        """Return (path, signed headers) of a request for the object `name` of the table.

        The names of `headers` have underscores in place of hyphens.
        """
        path = f"/{self.bucket}/{self.prefix}{name}"
        extra_headers = {header.replace("_", "-"): value for header, value in headers.items()}
        signed_headers = sign_headers(
            RequestTarget(method, path, query, {"host": urlsplit(self.endpoint).netloc, **extra_headers}),
            access_key_id=self.access_key,
            secret=self.secret,
            token=self.token,
            region=self.region,
            payload=payload,
            now_ms=SystemClock().now_ms(),
        )
        return path, signed_headers

    def make_client(self, *, verify: str | None = None, **options: Any) -> Any:
        """Return a boto3 client.

        `verify` is the file with the certificate of the authority that issued the gateway's certificate.
        """
        settings = Config(
            s3={"addressing_style": "path"}, retries={"max_attempts": 1}, **({"signature_version": "s3v4"} | options)
        )
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret,
            aws_session_token=self.token or None,
            config=settings,
            verify=verify,
        )

    def open_obstore(self) -> S3Store:
        return S3Store(
            self.bucket,
            prefix=self.prefix.rstrip("/"),
            config={
                "endpoint": self.endpoint,
                "access_key_id": self.access_key,
                "secret_access_key": self.secret,
                "session_token": self.token,
                "region": self.region,
            },
            client_options={"allow_http": True},
        )

    def open_s3fs(self) -> s3fs.S3FileSystem:
        return s3fs.S3FileSystem(
            key=self.access_key,
            secret=self.secret,
            token=self.token,
            endpoint_url=self.endpoint,
            client_kwargs={"region_name": self.region},
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    def open_pyarrow(self) -> pa.fs.S3FileSystem:
        endpoint = urlsplit(self.endpoint)
        return pa.fs.S3FileSystem(
            access_key=self.access_key,
            secret_key=self.secret,
            session_token=self.token,
            region=self.region,
            scheme=endpoint.scheme,
            endpoint_override=endpoint.netloc,
        )


@dataclass(frozen=True)
class GatewayRig:
    """A server, its objects gateway, and direct access to the objects behind the gateway."""

    seamark: Seamark
    gateway: str
    direct_store: S3 | None
    """The store behind the gateway, or None if it is a folder."""
    folder: Path
    """The folder that has the objects as files. Each bucket is a subfolder."""

    def request(self, method: str, path: str, body: object = None, token: str = "", **headers: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.seamark.base_url}{path}", method=method, data=None if body is None else json.dumps(body).encode()
        )
        for name, value in {"Content-Type": "application/json", **headers}.items():
            request.add_header(name.replace("_", "-"), value)
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            data = answer.read()
        return json.loads(data) if data else {}

    def create_table(self, name: str, *, namespace: str = "ns", token: str = "") -> Keys:
        namespaces = self.request("GET", "/v1/namespaces", token=token)["namespaces"]
        if [namespace] not in namespaces:
            self.request("POST", "/v1/namespaces", {"namespace": [namespace]}, token=token)
        self.request("POST", f"/v1/namespaces/{namespace}/tables", {"name": name, "schema": SCHEMA}, token=token)
        return self.load_keys(name, namespace=namespace, token=token)

    def has_table(self, name: str, *, namespace: str = "ns") -> bool:
        try:
            return bool(self.load_keys(name, namespace=namespace))
        except urllib.error.HTTPError:
            return False

    def load_keys(self, name: str, *, namespace: str = "ns", token: str = "") -> Keys:
        loaded_table = self.request("GET", f"/v1/namespaces/{namespace}/tables/{name}", token=token)
        return read_keys(loaded_table)


def read_keys(loaded_table: dict[str, Any]) -> Keys:
    config, location = loaded_table["config"], loaded_table["metadata"]["location"]
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    return Keys(
        config["s3.endpoint"],
        config["s3.region"],
        config["s3.access-key-id"],
        config["s3.secret-access-key"],
        config["s3.session-token"],
        bucket,
        f"{prefix}/",
    )


@contextmanager
def open_rig(folder: Path, s3: S3 | None, **env: str) -> Iterator[GatewayRig]:
    port = choose_free_port()
    settings = {"SEAMARK_GATEWAY_PORT": str(port), "SEAMARK_S3_CLIENT_ACCESS": "gateway"}
    if s3 is None:
        root, bucket = folder / "objects", "lake"
        settings["SEAMARK_S3_FOLDER"] = str(root)
    else:
        root, bucket = s3.root, s3.create_bucket()
        settings |= s3.build_seamark_env()
    with Seamark(folder / "home", warehouse=f"s3://{bucket}/wh", env=settings | env) as seamark:
        yield GatewayRig(seamark, f"http://127.0.0.1:{port}", s3, root)


@contextmanager
def open_cloud_rig(folder: Path, bucket: str, settings: dict[str, str]) -> Iterator[GatewayRig]:
    """Open a server whose gateway is in front of a cloud's bucket. `settings` name the cloud and its credentials."""
    port = choose_free_port()
    settings = {"gateway_port": str(port), "s3_client_access": "gateway", **settings}
    env = {f"SEAMARK_{name.upper()}": value for name, value in settings.items()}
    with Seamark(folder / "home", warehouse=f"s3://{bucket}/wh", env=env) as seamark:
        yield GatewayRig(seamark, f"http://127.0.0.1:{port}", None, folder)
