"""A proxy that turns uploads of the XML API of Google Cloud Storage into uploads of its JSON API.

Its arguments are the address of the emulator, and the port of the proxy. It is a separate process, because pyarrow
holds Python's lock while it waits for Google Cloud Storage.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from urllib.parse import quote, unquote, urlencode

import aiohttp
from aiohttp import web
from yarl import URL

TOKEN_PATH = "/token"
"""The path at which the proxy issues tokens to service accounts. The emulator accepts every token."""
_NO_SUCH_BUCKET = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>NoSuchBucket</Code>'
    "<Message>The specified bucket does not exist.</Message></Error>"
)
_uploads: dict[str, tuple[Mapping[str, str], dict[int, bytes]]] = {}
"""The headers and the parts of each multipart upload, by its id."""
_FORWARDED_HEADERS = ("content-type", "authorization")


async def serve(upstream: str, port: int) -> None:
    """Run the proxy on 127.0.0.1:`port` before the emulator at `upstream`, until the process ends."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await _forward(session, upstream, request)

        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


async def _forward(session: aiohttp.ClientSession, upstream: str, request: web.BaseRequest) -> web.StreamResponse:
    """Forward the request. If the emulator lacks a request of the XML API, use the JSON API instead."""
    if request.path == TOKEN_PATH:
        return web.json_response({"access_token": "any", "expires_in": 3600, "token_type": "Bearer"})
    body = await request.content.read()  # request.read() has a limit of a megabyte.
    is_xml = not request.path.startswith(("/upload/", "/storage/", "/_"))
    if is_xml and ("uploads" in request.query or "uploadId" in request.query):
        return await _upload_in_parts(session, upstream, request, body)
    if is_xml and "x-goog-copy-source" in request.headers:
        return await _copy_object(session, upstream, request)
    if is_xml and request.method == "PUT":
        return await _upload(session, upstream, request.path, request.headers, body)
    headers = {name: value for name, value in request.headers.items() if name.lower() != "transfer-encoding"}
    url = URL(f"{upstream}{request.raw_path}", encoded=True)
    async with session.request(request.method, url, headers=headers, data=body, allow_redirects=False) as answer:
        data = await answer.read()
        response = web.Response(status=answer.status, body=data)
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date"):
                response.headers[name] = value
        if request.method == "HEAD" and "Content-Length" in answer.headers:
            response.headers["Content-Length"] = answer.headers["Content-Length"]
        return response


async def _copy_object(session: aiohttp.ClientSession, upstream: str, request: web.BaseRequest) -> web.StreamResponse:
    """Answer a copy request of the XML API with a copy through the JSON API."""
    source_bucket, _, source_name = unquote(request.headers["x-goog-copy-source"]).removeprefix("/").partition("/")
    bucket, _, target_name = request.path.removeprefix("/").partition("/")
    path = f"b/{source_bucket}/o/{quote(source_name, safe='')}/rewriteTo/b/{bucket}/o/{quote(target_name, safe='')}"
    async with session.post(URL(f"{upstream}/storage/v1/{path}", encoded=True), json={}) as answer:
        return web.Response(status=answer.status, text="<CopyObjectResult></CopyObjectResult>")


async def _upload_in_parts(
    session: aiohttp.ClientSession, upstream: str, request: web.BaseRequest, body: bytes
) -> web.StreamResponse:
    """Answer a request of a multipart upload. The parts stay in memory until the upload is completed."""
    if "uploads" in request.query:
        upload_id = f"upload-{len(_uploads)}"
        _uploads[upload_id] = (request.headers, {})
        text = f"<InitiateMultipartUploadResult><UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
        return web.Response(text=text, content_type="application/xml")
    headers, parts = _uploads[request.query["uploadId"]]
    if request.method == "PUT":
        parts[int(request.query["partNumber"])] = body
        return web.Response(headers={"ETag": f'"part-{request.query["partNumber"]}"'})
    if request.method == "DELETE":
        return web.Response(status=204)
    data = b"".join(parts[number] for number in sorted(parts))
    stored_object = await _upload(session, upstream, request.path, headers, data)
    text = (
        f"<CompleteMultipartUploadResult><ETag>{stored_object.headers['ETag']}</ETag></CompleteMultipartUploadResult>"
    )
    generation = stored_object.headers["x-goog-generation"]
    return web.Response(text=text, content_type="application/xml", headers={"x-goog-generation": generation})


async def _upload(
    session: aiohttp.ClientSession, upstream: str, path: str, received_headers: Mapping[str, str], body: bytes
) -> web.StreamResponse:
    """Answer an upload of the XML API with an upload through the JSON API."""
    bucket, _, name = path.removeprefix("/").partition("/")
    query = {"uploadType": "media", "name": name}
    if "x-goog-if-generation-match" in received_headers:
        query["ifGenerationMatch"] = received_headers["x-goog-if-generation-match"]
    headers = {
        key: value
        for key, value in received_headers.items()
        if key.lower() in _FORWARDED_HEADERS or key.lower().startswith("x-goog-meta-")
    }
    url = URL(f"{upstream}/upload/storage/v1/b/{bucket}/o?{urlencode(query)}", encoded=True)
    async with session.post(url, headers=headers, data=body) as answer:
        if answer.status == 404:
            return web.Response(status=404, text=_NO_SUCH_BUCKET, content_type="application/xml")
        if answer.status != 200:
            return web.Response(status=answer.status, text=await answer.text())
        stored_object = json.loads(await answer.read())
    return web.Response(
        headers={"ETag": f'"{stored_object["etag"]}"', "x-goog-generation": str(stored_object["generation"])}
    )


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
