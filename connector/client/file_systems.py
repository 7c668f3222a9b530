"""Opens objects in remote storages for readers, writers and jobs.

Each storage has a class in this module and an entry in `CLIENT_STORAGES`. `formats/storage/storages.py` defines its
schemes and the form of its locations. `connector/client/storage.py` opens local files without following symbolic links.
"""

from __future__ import annotations

import io
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from seamark.formats.runtime.lazy_module import LazyModule
from seamark.formats.runtime.tls import find_or_create_authorities_file
from seamark.formats.storage.storages import find_rules

if TYPE_CHECKING:
    import hdfs_native
else:
    hdfs_native = LazyModule("hdfs_native")

HDFS_CONFIG_FOLDER = "hdfs.config-folder"
"""The property with the folder of Hadoop's configuration. Only processes of the server get it, from `use_keys`."""
_HDFS_PORTS = (8020, 9000, 9866, 9867)
_TOKEN_LIFETIME_S = 3600
"""The assumed lifetime in seconds of a Google token whose expiry is unknown."""


class ClientStorage(ABC):
    """A kind of remote storage, such as S3."""

    @abstractmethod
    def create_file_system(self, properties: Mapping[str, str], fallback_keys: Mapping[str, str]) -> fs.FileSystem:
        """Return the file system with the objects, on which `make_path` returns paths.

        Args:
            properties: The address and the keys for a table, in the form of a LoadTableResult.
            fallback_keys: The keys of this process, which are used if `properties` has no keys. Only processes that the
                server starts have such keys.
        """

    def make_path(self, address: str) -> str:
        """Return the path on the file system for a location. `address` is the text of the location after `://`."""
        return address

    def has_keys(self, properties: Mapping[str, str]) -> bool:
        """Return whether the properties contain keys with which a process without its own keys can read the objects.

        By default, the storage needs no keys. Other kinds of storage override this method.
        """
        return True

    def list_urls(self, properties: Mapping[str, str]) -> list[str]:
        """Return the URLs to which a confined process may connect in addition to the URLs of the server.

        A URL without a host, such as `https://`, allows each host.
        """
        return []

    def list_configuration_files(self) -> list[str]:
        """Return the files outside of tables that a confined process may read."""
        return []


class S3Client(ClientStorage):
    """S3 with pyarrow. The keys come from the catalog, from `fallback_keys`, or from AWS's default credential chain."""

    def create_file_system(self, properties: Mapping[str, str], fallback_keys: Mapping[str, str]) -> fs.FileSystem:
        keys = properties if properties.get("s3.access-key-id") else {**properties, **fallback_keys}
        endpoint = urlsplit(properties["s3.endpoint"]) if properties.get("s3.endpoint") else None
        return fs.S3FileSystem(
            access_key=keys.get("s3.access-key-id"),
            secret_key=keys.get("s3.secret-access-key"),
            session_token=keys.get("s3.session-token"),
            region=properties.get("s3.region") or properties.get("client.region"),
            scheme=endpoint.scheme if endpoint else "https",
            endpoint_override=endpoint.netloc if endpoint else None,
            force_virtual_addressing=properties.get("s3.path-style-access", "true").lower() == "false",
            tls_ca_file_path=find_or_create_authorities_file(),
        )

    def has_keys(self, properties: Mapping[str, str]) -> bool:
        return "s3.access-key-id" in properties

    def list_urls(self, properties: Mapping[str, str]) -> list[str]:
        """Return the URLs of S3 and of AWS's sources of keys, to which a confined process may connect."""
        aws_urls = [value for name, value in os.environ.items() if name.startswith("AWS_") and "://" in value]
        # Machines of AWS provide their keys over plain HTTP.
        return [*properties.get("s3.endpoint", "").split(), "https://", "http://", *aws_urls]

    def list_configuration_files(self) -> list[str]:
        """Return AWS's configuration files, which a confined process may read to find its keys."""
        aws_paths = [value for name, value in os.environ.items() if name.startswith("AWS_") and os.path.isabs(value)]
        return [*aws_paths, os.path.expanduser("~/.aws")]


class AzureClient(ClientStorage):
    """Azure storage with pyarrow.

    The key, SAS or application comes from the catalog, from `fallback_keys`, or from Azure's environment variables and
    identities.
    """

    def create_file_system(self, properties: Mapping[str, str], fallback_keys: Mapping[str, str]) -> fs.FileSystem:
        keys = properties if self.has_keys(properties) else {**properties, **fallback_keys}
        names = {
            "account_name": "adls.account-name",
            "account_key": "adls.account-key",
            "sas_token": "adls.sas-token",
            "tenant_id": "adls.tenant-id",
            "client_id": "adls.client-id",
            "client_secret": "adls.client-secret",
            "blob_storage_authority": "adls.blob-storage-authority",
            "blob_storage_scheme": "adls.blob-storage-scheme",
            "dfs_storage_authority": "adls.dfs-storage-authority",
            "dfs_storage_scheme": "adls.dfs-storage-scheme",
        }
        return fs.AzureFileSystem(**{name: keys[key] for name, key in names.items() if keys.get(key)})

    def make_path(self, address: str) -> str:
        authority, slash, key = address.partition("/")
        return authority.partition("@")[0] + slash + key

    def has_keys(self, properties: Mapping[str, str]) -> bool:
        return any(properties.get(name) for name in ("adls.sas-token", "adls.account-key", "adls.client-secret"))

    def list_urls(self, properties: Mapping[str, str]) -> list[str]:
        scheme = properties.get("adls.blob-storage-scheme", "https")
        authority = properties.get("adls.blob-storage-authority", "")
        # Machines of Azure provide their tokens over plain HTTP.
        return [*([f"{scheme}://{authority}"] if authority else []), "https://", "http://"]

    def list_configuration_files(self) -> list[str]:
        files = [value for name, value in os.environ.items() if name.startswith("AZURE_") and os.path.isabs(value)]
        return [*files, os.path.expanduser("~/.azure")]


class GoogleClient(ClientStorage):
    """Google Cloud Storage with pyarrow.

    The token comes from the catalog, from `fallback_keys`, or from Google's application default credentials.
    """

    def create_file_system(self, properties: Mapping[str, str], fallback_keys: Mapping[str, str]) -> fs.FileSystem:
        keys = properties if self.has_keys(properties) else {**properties, **fallback_keys}
        endpoint = urlsplit(properties.get("gcs.service.host", ""))
        options: dict[str, Any] = {}
        if endpoint.netloc:
            options |= {"scheme": endpoint.scheme, "endpoint_override": endpoint.netloc}
        if keys.get("gcs.oauth2.token"):
            # pyarrow requires an expiry, and refuses to use the token after it.
            expires_s = int(keys.get("gcs.oauth2.token-expires-at", "0")) / 1000 or time.time() + _TOKEN_LIFETIME_S
            options["access_token"] = keys["gcs.oauth2.token"]
            options["credential_token_expiration"] = datetime.fromtimestamp(expires_s, UTC)
        elif properties.get("gcs.no-auth") == "true":
            options["anonymous"] = True
        return fs.GcsFileSystem(**options)

    def has_keys(self, properties: Mapping[str, str]) -> bool:
        return "gcs.oauth2.token" in properties or properties.get("gcs.no-auth") == "true"

    def list_urls(self, properties: Mapping[str, str]) -> list[str]:
        """Return the URLs of the storage and of Google's sources of tokens, to which a confined process may connect.

        Connections are restricted by port. `https://` and `http://` allow the default ports of both protocols.
        """
        # Machines of Google provide their tokens over plain HTTP.
        return [*properties.get("gcs.service.host", "").split(), "https://", "http://"]

    def list_configuration_files(self) -> list[str]:
        files = [value for name, value in os.environ.items() if name.startswith("GOOGLE_") and os.path.isabs(value)]
        return [*files, os.path.expanduser("~/.config/gcloud")]


class _DurableFile(io.RawIOBase):
    """A new file in HDFS, whose bytes are on the disks of the DataNodes when it is closed.

    An empty file has no block whose bytes could be written to a disk (`hsync`).
    """

    def __init__(self, writer: hdfs_native.FileWriter) -> None:
        super().__init__()
        self._writer = writer
        self._is_empty = True

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._is_empty = False
        return self._writer.write(data)

    def close(self) -> None:
        if not self.closed:
            if not self._is_empty:
                self._writer.hsync()
            self._writer.close()
        super().close()


class HdfsFiles(fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """The files of HDFS for pyarrow, through the library hdfs-native. A path begins with the nameservice.

    It has only the operations of readers and writers. They create, read and delete files, and never rename a file.
    """

    def __init__(self, config_folder: str) -> None:
        self._config_folder = config_folder

    def get_type_name(self) -> str:
        return "hdfs"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[fs.FileInfo]:
        infos = []
        for path in paths:
            client, hdfs_path = self._open_client(path)
            try:
                status = client.get_file_info(hdfs_path)
            except FileNotFoundError:
                infos.append(fs.FileInfo(path, fs.FileType.NotFound))
            else:
                infos.append(_describe_hdfs_file(path, status))
        return infos

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        client, hdfs_path = self._open_client(selector.base_dir)
        authority = selector.base_dir.partition("/")[0]
        try:
            statuses = list(client.list_status(hdfs_path, recursive=selector.recursive))
        except FileNotFoundError:
            if selector.allow_not_found:
                return []
            raise
        return [_describe_hdfs_file(f"{authority}{status.path}", status) for status in statuses]

    def create_dir(self, path: str, recursive: bool) -> None:
        client, hdfs_path = self._open_client(path)
        client.mkdirs(hdfs_path, create_parent=recursive)

    def delete_file(self, path: str) -> None:
        client, hdfs_path = self._open_client(path)
        if not client.delete(hdfs_path, False):
            raise FileNotFoundError(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        client, hdfs_path = self._open_client(path)
        return pa.PythonFile(client.read(hdfs_path), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def open_output_stream(self, path: str, metadata: object) -> pa.NativeFile:
        client, hdfs_path = self._open_client(path)
        options = hdfs_native.WriteOptions(overwrite=False, create_parent=True)
        return pa.PythonFile(_DurableFile(client.create(hdfs_path, options)), mode="w")

    def _refuse(self, *_: object, **__: object) -> Any:
        raise NotImplementedError("Readers and writers of tables neither rename, copy nor append to files")

    delete_dir = delete_dir_contents = delete_root_dir_contents = _refuse
    move = copy_file = open_append_stream = _refuse

    def _open_client(self, path: str) -> tuple[hdfs_native.Client, str]:
        authority, _, hdfs_path = path.partition("/")
        return _open_hdfs_client(authority, self._config_folder), f"/{hdfs_path}"


def _describe_hdfs_file(path: str, status: hdfs_native.FileStatus) -> fs.FileInfo:
    kind = fs.FileType.Directory if status.isdir else fs.FileType.File
    return fs.FileInfo(path, kind, mtime_ns=status.modification_time * 1_000_000, size=status.length)


@lru_cache(maxsize=64)
def _open_hdfs_client(authority: str, config_folder: str) -> hdfs_native.Client:
    return hdfs_native.Client(f"hdfs://{authority}", config_dir=config_folder or None)


class HdfsClient(ClientStorage):
    """HDFS. The configuration of Hadoop is in a folder of `fallback_keys`, or of the variable HADOOP_CONF_DIR.

    `fallback_keys` are the keys of this process. They have the folder only in processes that the server starts.
    """

    def create_file_system(self, properties: Mapping[str, str], fallback_keys: Mapping[str, str]) -> fs.FileSystem:
        return fs.PyFileSystem(HdfsFiles(fallback_keys.get(HDFS_CONFIG_FOLDER, "")))

    def has_keys(self, properties: Mapping[str, str]) -> bool:
        return False

    def list_urls(self, properties: Mapping[str, str]) -> list[str]:
        # The default ports of NameNodes and DataNodes. The location of the table is not known here, so the host `hdfs`
        # is only a placeholder.
        return [f"hdfs://hdfs:{port}" for port in _HDFS_PORTS]

    def list_configuration_files(self) -> list[str]:
        variables = [os.environ.get(name, "") for name in ("HADOOP_CONF_DIR", "HADOOP_HOME", "KRB5_CONFIG")]
        return [*filter(os.path.isabs, variables), "/etc/krb5.conf"]


CLIENT_STORAGES: dict[str, ClientStorage] = {
    "s3": S3Client(),
    "gs": GoogleClient(),
    "abfss": AzureClient(),
    "hdfs": HdfsClient(),
}
"""The storages by the scheme of normalised locations."""


def find_client_storage(location: str) -> ClientStorage | None:
    """Return the storage of a location, or None for a local file and for an unknown scheme."""
    rules = find_rules(location.partition(":")[0])
    return None if rules is None else CLIENT_STORAGES.get(rules.scheme)


def list_schemes() -> list[str]:
    """Return the schemes of all remote storages, and their aliases."""
    rules = [find_rules(scheme) for scheme in CLIENT_STORAGES]
    return [scheme for rule in rules if rule is not None for scheme in rule.schemes]
