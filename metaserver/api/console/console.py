"""The page of the web console at `/`, and its assets below `/console/`.

The assets are public and the same for all users. The page reads all data from the API with the user's token. The server
reads the assets once, so no path of a request reaches the file system. The folder in the URLs of the assets is a digest
of all assets, so browsers can cache them without revalidation, and a new version has new URLs.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from seamark.formats.runtime.errors import NotFound
from seamark.metaserver.api.http.dispatch import Route

FOLDER = Path(__file__).parent / "assets"
_PAGE_NAME = "index.html"
_DIGEST_CHARACTERS = 16
_MODULES, _ROOT = "<!-- modules -->", "console/assets/"
"""The texts of `index.html` that the list of modules and the folder of the assets replace."""
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".json": "application/json",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The Content-Security-Policy. It forbids inline scripts, other hosts, and texts that become markup."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "Accept-Encoding",
}


class Asset(NamedTuple):
    """A file of the console."""

    content: bytes
    gzipped: bytes
    content_type: str


class Assets(NamedTuple):
    """The files of the console, by their path below the console's folder.

    Attributes:
        digest: The digest of all files, which is the name of their folder in URLs.
        page: `index.html` with the URLs of the assets.
    """

    digest: str
    files: dict[str, Asset]
    page: Asset


@cache
def load_assets() -> Assets:
    """Read the files of the console, and put their URLs into the page."""
    contents = {
        str(path.relative_to(FOLDER)): path.read_bytes() for path in sorted(FOLDER.rglob("*")) if path.suffix in _TYPES
    }
    page = contents.pop(_PAGE_NAME).decode()
    files_hash = hashlib.sha256()
    for name, content in contents.items():
        files_hash.update(f"{name} {len(content)}\n".encode() + content)
    digest = files_hash.hexdigest()[:_DIGEST_CHARACTERS]
    modules = [name for name in contents if name.endswith((".js", ".mjs"))]
    # With these links, the browser requests all modules at once. Otherwise, each level of imports would wait
    # for the level before it.
    links = "\n".join(f'    <link rel="modulepreload" href="{_ROOT}{name}">' for name in modules)
    page = page.replace(f"    {_MODULES}", links).replace(_ROOT, f"console/{digest}/")
    files = {name: _make_asset(name, content) for name, content in contents.items()}
    return Assets(digest, files, _make_asset(_PAGE_NAME, page.encode()))


def _make_asset(name: str, content: bytes) -> Asset:
    return Asset(content, gzip.compress(content, mtime=0), _TYPES[Path(name).suffix])


@Route("GET", "/", "console", public=True).takes_request
async def console(request: web.Request) -> web.Response:
    """Return the page of the console."""
    return _answer_asset(request, load_assets().page, "no-cache")


@Route("GET", "/console/{digest}/{asset}", "consoleAsset", public=True).takes_request
async def console_asset(request: web.Request) -> web.Response:
    """Return an asset of the console."""
    return _find_asset(request, request.match_info["asset"])


@Route("GET", "/console/{digest}/{folder}/{asset}", "consoleFolderAsset", public=True).takes_request
async def console_folder_asset(request: web.Request) -> web.Response:
    """Return an asset in a folder of the console."""
    return _find_asset(request, f"{request.match_info['folder']}/{request.match_info['asset']}")


def _find_asset(request: web.Request, name: str) -> web.Response:
    """Return the response with an asset, which the client may cache for a year.

    Raises:
        NotFound: The console of this version has no such asset.
    """
    assets = load_assets()
    asset = assets.files.get(name) if request.match_info["digest"] == assets.digest else None
    if asset is None:
        raise NotFound("The console has no such file; reload the page")
    return _answer_asset(request, asset, "public, max-age=31536000, immutable")


def _answer_asset(request: web.Request, asset: Asset, cache_control: str) -> web.Response:
    """Return the response with an asset, gzipped if the client accepts it."""
    headers = {**_HEADERS, "Cache-Control": cache_control}
    accepts_gzip = "gzip" in request.headers.get("Accept-Encoding", "")
    if accepts_gzip:
        headers["Content-Encoding"] = "gzip"
    body = asset.gzipped if accepts_gzip else asset.content
    return web.Response(body=body, content_type=asset.content_type, charset="utf-8", headers=headers)
