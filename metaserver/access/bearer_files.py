"""Bearer tokens in files, which the server sends to an issuer or to a policy server."""

from __future__ import annotations

from pathlib import Path

_TOKEN_FILE_BYTES_MAX = 1 << 16


def read_bearer_token(path: Path) -> str:
    """Return the bearer token in a file.

    Raises:
        ValueError: The file has no single line of printable ASCII, or is too long.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(_TOKEN_FILE_BYTES_MAX + 1)
    token = content.strip()
    if not token or len(content) > _TOKEN_FILE_BYTES_MAX or not token.isascii() or not token.decode().isprintable():
        raise ValueError(f"the file {path} has no bearer token")
    return token.decode()
