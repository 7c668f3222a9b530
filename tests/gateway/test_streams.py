"""Tests of bodies through the gateway: streamed in pieces, stored completely or not at all, and within limits."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from botocore.exceptions import ClientError

from seamark.metaserver.gateway.sigv4 import SignatureClaim, derive_signing_key
from tests.gateway.rig import GatewayRig, Keys, open_rig
from tests.services.process import choose_free_port
from tests.services.s3 import S3, run_s3
from tests.waits import block_until

_numbers = itertools.count()
MEBIBYTE = 1 << 20


@pytest.fixture
def keys(rig: GatewayRig) -> Keys:
    return rig.create_table(f"s{next(_numbers)}")


@pytest.fixture
def client(keys: Keys) -> Iterator[Any]:
    with closing(keys.make_client()) as client:
        yield client


def put_object(keys: Keys, name: str, payload: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    target, signed_headers = keys.sign("PUT", name, payload, **headers)
    with closing(http.client.HTTPConnection(urlsplit(keys.endpoint).netloc, timeout=30)) as connection:
        connection.request("PUT", target, body=body, headers=signed_headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def _is_absent(keys: Keys, client: Any, name: str) -> bool:
    try:
        client.head_object(Bucket=keys.bucket, Key=keys.prefix + name)
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"] == 404
    return False


def _build_chunks(signed_headers: dict[str, str], keys: Keys, data: list[bytes]) -> bytes:
    """Return a body of signed chunks, with an empty last chunk.

    The signature of each chunk covers the previous signature. The first one covers the signature of the header.
    """
    claim = SignatureClaim(
        keys.access_key, "", signed_headers["x-amz-date"], keys.region, (), signed_headers["authorization"][-64:], ""
    )
    key, previous_signature, body = derive_signing_key(keys.secret, claim.scope), claim.signature, b""
    empty_digest = hashlib.sha256(b"").hexdigest()
    import hmac

    for piece in (*data, b""):
        text = f"AWS4-HMAC-SHA256-PAYLOAD\n{claim.timestamp}\n{claim.scope}\n{previous_signature}\n{empty_digest}\n"
        previous_signature = hmac.digest(key, f"{text}{hashlib.sha256(piece).hexdigest()}".encode(), "sha256").hex()
        body += b"%x;chunk-signature=%s\r\n%s\r\n" % (len(piece), previous_signature.encode(), piece)
    return body


def test_body_that_differs_from_its_signature_is_not_stored(keys: Keys, client: Any) -> None:
    wrong_digest = hashlib.sha256(b"other").hexdigest()
    status, text = put_object(keys, "hash", wrong_digest, b"x" * MEBIBYTE)
    assert (status, b"XAmzContentSHA256Mismatch" in text) == (400, True)
    assert _is_absent(keys, client, "hash")


def test_signed_chunks_are_stored_but_changed_chunks_are_not(keys: Keys, client: Any) -> None:
    data = [b"a" * 65536, b"b" * 65536, b"c" * 100]  # Only the last chunk may be shorter than 8 KiB.
    length = str(sum(map(len, data)))
    options = {"x_amz_decoded_content_length": length, "content_encoding": "aws-chunked"}
    for name, change in (("good", b""), ("bad", b"b"), ("last", b"c"), ("cut", b"cut")):
        target, signed_headers = keys.sign("PUT", name, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", **options)
        body = _build_chunks(signed_headers, keys, data)
        if change == b"cut":  # Remove the data of the third chunk. Keep its first line and the empty last chunk.
            last_chunk_bytes, removed_bytes = 86, len(data[2] + b"\r\n")
            body = body[: len(body) - last_chunk_bytes - removed_bytes] + body[-last_chunk_bytes:]
        elif change:
            body = body.replace(change * 100, b"x" + change * 99, 1)
        with closing(http.client.HTTPConnection(urlsplit(keys.endpoint).netloc, timeout=30)) as connection:
            connection.request("PUT", target, body=body, headers=signed_headers)
            answer = connection.getresponse()
            answer.read()
        assert answer.status == (200 if name == "good" else 400 if name == "cut" else 403), name
        assert _is_absent(keys, client, name) is (name != "good"), name
    assert client.get_object(Bucket=keys.bucket, Key=keys.prefix + "good")["Body"].read() == b"".join(data)


def test_connection_that_ends_early_stores_nothing(folder_rig: GatewayRig) -> None:
    """The client announces 1,000,000 bytes without a hash, and disconnects after 500,000 bytes.

    The store is a folder. Other stores may treat such a short body differently: versitygw stores it.
    """
    rig, keys = folder_rig, folder_rig.create_table(f"s{next(_numbers)}")
    client = keys.make_client()
    target, signed_headers = keys.sign("PUT", "early", "UNSIGNED-PAYLOAD")
    with socket.create_connection((urlsplit(keys.endpoint).hostname, urlsplit(keys.endpoint).port)) as raw:
        head = "".join(f"{name}: {value}\r\n" for name, value in signed_headers.items())
        raw.sendall(f"PUT {target} HTTP/1.1\r\n{head}Content-Length: 1000000\r\n\r\n".encode() + b"x" * 500_000)
    client.put_object(Bucket=keys.bucket, Key=keys.prefix + "after", Body=b"x")
    assert _is_absent(keys, client, "early")
    client.close()
    uploads = rig.folder / ".seamark-uploads"
    block_until(lambda: [path.name for path in uploads.iterdir() if path.name != "lock" and path.is_file()] == [])


def test_bodies_over_the_limit_are_rejected_before_they_are_read(keys: Keys) -> None:
    target, signed_headers = keys.sign("PUT", "large", "UNSIGNED-PAYLOAD")
    with closing(http.client.HTTPConnection(urlsplit(keys.endpoint).netloc, timeout=30)) as connection:
        connection.putrequest("PUT", target, skip_host=True)
        for name, value in {**signed_headers, "content-length": str(6 << 30), "expect": "100-continue"}.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        assert (answer.status, b"EntityTooLarge" in answer.read()) == (400, True)


def test_requests_that_are_not_http_or_not_s3_get_an_s3_error(rig: GatewayRig) -> None:
    gateway = urlsplit(rig.gateway)
    for fault in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection((gateway.hostname, gateway.port)) as raw:
            raw.sendall(fault)
            raw.shutdown(socket.SHUT_WR)
            body = b"".join(iter(lambda raw=raw: raw.recv(65536), b""))  # type: ignore[misc]
        assert b"<Error>" in body or not body, (fault[:20], body)
    for method, target in itertools.product(
        ("GET", "PUT", "OPTIONS", "PATCH", "BREW"), ("/", "/b", "/b/k", "//", "/%", "*")
    ):
        with closing(http.client.HTTPConnection(gateway.netloc, timeout=30)) as connection:
            connection.request(method, target)
            answer = connection.getresponse()
            assert 400 <= answer.status < 500, (method, target, answer.status)
            assert b"<Error>" in answer.read()


def _read_rss(rig: GatewayRig) -> int:
    return psutil.Process(rig.seamark.pid).memory_info().rss


@pytest.mark.few_cases(1)
def test_objects_are_never_completely_in_memory(rig: GatewayRig, keys: Keys, client: Any, tmp_path: Path) -> None:
    size = 256 * MEBIBYTE
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    client.put_object(Bucket=keys.bucket, Key=keys.prefix + "warm", Body=b"x")
    rss_before, peak, is_over = _read_rss(rig), [0], threading.Event()

    def record_peak_memory() -> None:
        while not is_over.wait(0.02):
            peak[0] = max(peak[0], _read_rss(rig))

    watcher = threading.Thread(target=record_peak_memory)
    watcher.start()
    try:
        with (tmp_path / "large").open("rb") as file:
            client.put_object(Bucket=keys.bucket, Key=keys.prefix + "large", Body=file)
        body = client.get_object(Bucket=keys.bucket, Key=keys.prefix + "large")["Body"]
        # The reader is slow, and the server must not read ahead.
        assert sum(len(piece) for piece in body.iter_chunks(MEBIBYTE)) == size
        unread = client.get_object(Bucket=keys.bucket, Key=keys.prefix + "large")["Body"]
        assert len(unread.read(10)) == 10
        unread.close()
    finally:
        is_over.set()
        watcher.join()
    # The buffers take less than a quarter of the object.
    assert peak[0] - rss_before < 64 * MEBIBYTE, f"{(peak[0] - rss_before) / MEBIBYTE:.0f} MiB more"
    client.delete_object(Bucket=keys.bucket, Key=keys.prefix + "large")
    assert "unexpected error" not in rig.seamark.log.read_text()


def test_unavailable_or_killed_store_gives_no_short_object(tmp_path: Path) -> None:
    with run_s3(tmp_path / "s3") as s3:
        proxy = _CuttingProxy(s3)
        with closing(proxy), open_rig(tmp_path, s3, SEAMARK_S3_ENDPOINT=proxy.url) as rig:
            keys = rig.create_table("t")
            with closing(keys.make_client()) as client:
                object_address = {"Bucket": keys.bucket, "Key": keys.prefix + "o"}
                client.put_object(**object_address, Body=b"x" * 4 * MEBIBYTE)
                proxy.cut_after_bytes = MEBIBYTE
                assert client.get_object(**object_address)["Body"].read() == b"x" * 4 * MEBIBYTE, (
                    "the gateway must continue the answer after each cut"
                )
                proxy.stops_after_cut = True
                with pytest.raises(Exception, match=r"(?i)incomplete|closed|reset|broken|aborted"):
                    client.get_object(**object_address)["Body"].read()
                proxy.cut_after_bytes = 0
                with pytest.raises(ClientError) as raised_error:
                    client.get_object(**object_address)
                assert raised_error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
                proxy.stops_after_cut, proxy.cut_after_bytes = False, 1 << 40
                assert len(client.get_object(**object_address)["Body"].read()) == 4 * MEBIBYTE


class _CuttingProxy:
    """A TCP proxy before a store. It closes each connection after a number of bytes of answers."""

    def __init__(self, s3: S3) -> None:
        self.port = choose_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.cut_after_bytes = 1 << 40  # More than any test receives, so at first the proxy cuts no connection.
        self.stops_after_cut = False
        """If True, the proxy forwards nothing after the next cut."""
        self._store_address = urlsplit(s3.endpoint)
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            store = socket.create_connection((self._store_address.hostname, self._store_address.port))
            threading.Thread(target=self._forward, args=(client, store, False), daemon=True).start()
            threading.Thread(target=self._forward, args=(store, client, True), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, are_answers: bool) -> None:
        sent_bytes = 0
        with source, target:
            try:
                while data := source.recv(65536):
                    sent_bytes += len(data)
                    if are_answers and sent_bytes > self.cut_after_bytes:
                        if self.stops_after_cut:
                            self.cut_after_bytes = 0
                        break
                    target.sendall(data)
                for connection in (source, target):
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                return
