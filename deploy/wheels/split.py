"""Splits a wheel of the whole project into the wheel of the clients and that of the server.

    python deploy/wheels/split.py WHEEL FOLDER

`seamark-client` has what a notebook, a job or a Spark executor imports. `seamark` adds the server and the commands to
the same package, and requires the client of the same version. No file is in both, so that either can be installed or
removed with pip. The kernels are compiled once, for both.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import sys
import zipfile
from collections.abc import Iterable, Mapping
from email.message import Message
from email.parser import Parser
from pathlib import Path

SERVER_PACKAGES = ("metaserver", "commands")
"""Packages below `seamark` that only the server's wheel has. The client has all others."""
CLIENT = "seamark-client"
_SERVER_EXTRAS = ("server", "otel", "demo")
"""Extras that the client does not have."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def is_of_server(name: str) -> bool:
    """Return whether a file of the wheel, other than its metadata, belongs to the server."""
    top, _, rest = name.partition("/")
    return top == "seamark" and rest.partition("/")[0] in SERVER_PACKAGES


def split(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Write the two wheels into `folder`, and return the paths of the client's wheel and of the server's wheel."""
    name, version, *tags = wheel.name.removesuffix(".whl").split("-")
    with zipfile.ZipFile(wheel) as whole:
        files = {info.filename: whole.read(info) for info in whole.infolist() if not info.is_dir()}
    dist_info = f"{name}-{version}.dist-info/"
    metadata = Parser().parsestr(files[f"{dist_info}METADATA"].decode())
    own = {path: data for path, data in files.items() if not path.startswith(dist_info)}
    shared = {
        path.removeprefix(dist_info): data
        for path, data in files.items()
        if path.startswith(dist_info)
        and path not in (f"{dist_info}RECORD", f"{dist_info}METADATA", f"{dist_info}entry_points.txt")
    }
    commands = {"entry_points.txt": files[f"{dist_info}entry_points.txt"]}
    client = _write(
        folder,
        CLIENT,
        version,
        tags,
        {path: data for path, data in own.items() if not is_of_server(path)},
        {**shared, "METADATA": _make_client_metadata(metadata).as_string().encode()},
    )
    server = _write(
        folder,
        metadata["Name"],
        version,
        tags,
        {path: data for path, data in own.items() if is_of_server(path)},
        {**shared, **commands, "METADATA": _make_server_metadata(metadata, version).as_string().encode()},
    )
    return client, server


def _make_client_metadata(metadata: Message) -> Message:
    changed = _copy(metadata)
    changed.replace_header("Name", CLIENT)
    extras = metadata.get_all("Provides-Extra", ())
    _replace_all(changed, "Provides-Extra", (extra for extra in extras if extra not in _SERVER_EXTRAS))
    requirements = metadata.get_all("Requires-Dist", ())
    _replace_all(changed, "Requires-Dist", (line for line in requirements if _parse_extra(line) not in _SERVER_EXTRAS))
    return changed


def _make_server_metadata(metadata: Message, version: str) -> Message:
    changed = _copy(metadata)
    extras = [line for line in metadata.get_all("Requires-Dist", ()) if _parse_extra(line)]
    _replace_all(changed, "Requires-Dist", (f"{CLIENT}=={version}", *extras))
    return changed


def _copy(metadata: Message) -> Message:
    return Parser().parsestr(metadata.as_string())


def _replace_all(metadata: Message, header: str, values: Iterable[str]) -> None:
    values = list(values)
    del metadata[header]
    for value in values:
        metadata[header] = value


def _parse_extra(requirement: str) -> str:
    """Return the extra of a line `Requires-Dist`; empty for a library that is always needed."""
    _, marker, rest = requirement.partition("extra ==")
    return rest.strip().strip("'\"") if marker else ""


def _write(
    folder: Path, name: str, version: str, tags: list[str], files: Mapping[str, bytes], dist_info: Mapping[str, bytes]
) -> Path:
    """Write a wheel into `folder`, and return its path.

    Args:
        folder: The folder.
        name: The name of the package.
        version: The version of the package.
        tags: The tags of the wheel's name: Python, ABI and platform.
        files: The contents of the package's files, by path.
        dist_info: The contents of the files in the folder `.dist-info`, by name, without `RECORD`.
    """
    stem = f"{name.replace('-', '_')}-{version}"
    entries = {**files, **{f"{stem}.dist-info/{path}": data for path, data in dist_info.items()}}
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for path, data in entries.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.writerow((path, f"sha256={digest}", len(data)))
    rows.writerow((f"{stem}.dist-info/RECORD", "", ""))
    target = folder / f"{'-'.join((stem, *tags))}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in (*entries.items(), (f"{stem}.dist-info/RECORD", record.getvalue().encode())):
            info = zipfile.ZipInfo(path, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return target


if __name__ == "__main__":
    for path in split(Path(sys.argv[1]), Path(sys.argv[2])):
        print(path)  # noqa: T201
