"""The locations of HDFS: `hdfs://nameservice/path`.

HDFS has paths with a special meaning. `.snapshot` in a path names earlier versions of a folder, and `.reserved` names
files by their inode. Such a location would be a second name of another table's file, so it is refused. HDFS allows no
colon in a name.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from seamark.formats.runtime.errors import BadRequest
from seamark.formats.storage.rules import StorageRules

_AUTHORITY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?(?::[0-9]{1,5})?")
_RESERVED = frozenset((".snapshot", ".reserved"))
DEFAULT_PORT = ":8020"
"""The port of a NameNode to which Hadoop connects if a location has none."""


class Hdfs(StorageRules):
    """HDFS. The bucket of a location is the nameservice, or the NameNode with its port."""

    scheme = "hdfs"
    property_families = ("hdfs", "hadoop", "dfs")

    @property
    def form(self) -> str:
        return "hdfs://nameservice/path"

    def split(self, address: str, subject: str, shown_location: str) -> tuple[str, str]:
        if not address.startswith("//"):
            raise BadRequest(f"{subject} {shown_location} has no nameservice; write {self.form}")
        authority, _, path = address[2:].partition("/")
        if not _AUTHORITY.fullmatch(authority):
            raise BadRequest(
                f"{subject} {shown_location} has the invalid nameservice {authority!r}; write {self.form} or "
                "hdfs://namenode:8020/path"
            )
        if ":" in path:
            raise BadRequest(
                f"{subject} {shown_location} has a colon in its path, which HDFS does not allow; remove it"
            )
        for segment in path.split("/"):
            if unquote(segment).lower() in _RESERVED:
                raise BadRequest(f"{subject} {shown_location} contains {segment!r}, a reserved name of HDFS; remove it")
        # Names of hosts ignore case, but Hadoop compares the names of nameservices exactly.
        return authority.lower() if ":" in authority else authority, path

    def make_bucket_key(self, bucket: str) -> str:
        # A name without a port is a nameservice, whose case matters, or a host, whose case does not. Both spellings of
        # a host must be equal, so all names are in lower case.
        return bucket.lower()

    def normalize(self, address: str) -> str:
        authority, slash, path = address.removeprefix("//").partition("/")
        return f"{self.scheme}://{authority.lower().removesuffix(DEFAULT_PORT)}{slash}{path}"
