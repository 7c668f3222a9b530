"""Builds XML answers of the S3 API, for backends that are not S3 stores."""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import web

from seamark.metaserver.gateway.backend import S3Call
from seamark.metaserver.gateway.s3_errors import XML, escape_xml

XML_HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


def answer_copy(root: str, etag: str, modified_ns: int, call: S3Call) -> web.Response:
    return make_xml_response(
        make_document(
            root, build_xml_element("ETag", etag) + build_xml_element("LastModified", format_timestamp(modified_ns))
        ),
        call,
    )


def name_object(call: S3Call) -> str:
    return build_xml_element("Bucket", call.address.bucket) + build_xml_element("Key", call.address.key)


def build_xml_element(name: str, value: str) -> str:
    return f"<{name}>{escape_xml(value)}</{name}>"


def make_document(root: str, text: str) -> bytes:
    return f'{XML_HEAD}<{root} xmlns="{NAMESPACE}">{text}</{root}>'.encode()


def make_xml_response(document: bytes, call: S3Call) -> web.Response:
    return web.Response(body=document, content_type=XML, headers={"x-amz-request-id": call.request_id})


def format_timestamp(modified_ns: int) -> str:
    time = datetime.fromtimestamp(modified_ns / 1e9, UTC)
    return time.strftime("%Y-%m-%dT%H:%M:%S.") + f"{modified_ns // 1_000_000 % 1000:03d}Z"
