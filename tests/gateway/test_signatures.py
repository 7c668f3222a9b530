"""Tests of signatures and chunked bodies, compared with botocore and with the example in AWS's documentation."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise
from urllib.parse import quote, urlsplit

import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import Forbidden
from seamark.metaserver.access.gateway_keys import ExpiredGrant, GatewayKeys
from seamark.metaserver.gateway.aws_chunked import SIGNED, SIGNED_TRAILER, UNSIGNED_TRAILER, ChunkDecoder
from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.gateway.sigv4 import (
    ALGORITHM,
    RequestTarget,
    SignatureClaim,
    check_signed_headers,
    derive_signing_key,
    is_signed,
    read_claim,
    sign_headers,
    split_presigned,
)
from seamark.metaserver.objects.s3_scope import parse_target
from tests.access.keyrings import make_fixed_keyring

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
KEYS = Credentials("AKIAIOSFODNN7EXAMPLE", SECRET, "a/token+")
text = st.text(
    st.characters(exclude_categories=("Cs", "Cc")), max_size=12
)  # Neither surrogates nor control characters.


def read_signed_request(method: str, url: str, headers: dict[str, str]) -> tuple[SignatureClaim, RequestTarget]:
    parts = urlsplit(url)
    lower_headers = {name.lower(): value for name, value in headers.items()}
    target = RequestTarget(method, parts.path, parts.query, lower_headers)
    _, presigned_parameters = split_presigned(parse_target(f"{parts.path}?{parts.query}").query)
    return read_claim(target, presigned_parameters, now_ms=SystemClock().now_ms()), target


@given(
    key=text,
    parameters=st.dictionaries(text.filter(bool), text, max_size=3),
    meta=st.from_regex(r"[!-~]( ?[!-~]){0,9}"),
)
def test_requests_are_accepted_only_as_botocore_signed_them(key: str, parameters: dict[str, str], meta: str) -> None:
    query = "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in parameters.items())
    url = f"http://host:1/bucket/k{quote(key, safe='/-_.~')}{'?' if query else ''}{query}"
    meta = meta.strip("\n")
    request = AWSRequest("PUT", url, headers={"Host": "host:1", "x-amz-meta-a": meta}, data=b"body")
    S3SigV4Auth(KEYS, "s3", "us-east-1").add_auth(request)
    claim, target = read_signed_request("PUT", url, dict(request.headers.items()))
    assert claim.payload == hashlib.sha256(b"body").hexdigest()
    check_signed_headers(claim, target.headers)
    assert is_signed(claim, target, SECRET)
    for changed_request in (
        replace(target, method="GET"),
        replace(target, path=target.path + "x"),
        replace(target, query=target.query + "&x=1"),
        replace(target, headers=target.headers | {"x-amz-meta-a": meta + "x"}),
        replace(target, headers=target.headers | {"host": "other"}),
    ):
        assert not is_signed(claim, changed_request, SECRET)
    assert not is_signed(claim, target, SECRET + "x")
    with pytest.raises(S3Error, match="not signed"):
        check_signed_headers(claim, target.headers | {"x-amz-copy-source": "/b/k"})


@given(key=text)
def test_urls_presigned_by_botocore_are_accepted(key: str) -> None:
    request = AWSRequest("GET", f"http://host:1/bucket/k{quote(key, safe='/-_.~')}")
    S3SigV4QueryAuth(KEYS, "s3", "us-east-1", expires=60).add_auth(request)
    claim, target = read_signed_request("GET", request.url, {"Host": "host:1"})
    assert (claim.token, claim.payload) == ("a/token+", "UNSIGNED-PAYLOAD")
    assert is_signed(claim, target, SECRET)
    assert not is_signed(claim, replace(target, method="DELETE"), SECRET)


def test_signatures_of_seamark_are_accepted() -> None:
    target = RequestTarget("PUT", "/b/a%20b", "x=1", {"host": "h", "x-amz-meta-a": "b"})
    headers = sign_headers(
        target,
        access_key_id="AK",
        secret=SECRET,
        token="t",
        region="eu",
        payload="UNSIGNED-PAYLOAD",
        now_ms=SystemClock().now_ms(),
    )
    claim = read_claim(replace(target, headers=headers), {}, now_ms=SystemClock().now_ms())
    check_signed_headers(claim, headers)
    assert is_signed(claim, replace(target, headers=headers), SECRET)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "AccessDenied"),
        ({"authorization": "AWS AK:signature"}, "AuthorizationHeaderMalformed"),
        ({"authorization": f"{ALGORITHM} Credential=a/b, SignedHeaders=host, Signature={'0' * 64}"}, "AccessDenied"),
        (
            {
                "authorization": f"{ALGORITHM} Credential=a/20130524/r/s3/aws4_request,SignedHeaders=host,"
                f"Signature={'0' * 64}",
                "x-amz-date": "20130524T000000Z",
            },
            "RequestTimeTooSkewed",
        ),
    ],
)
def test_malformed_authentication_is_an_s3_error(headers: dict[str, str], code: str) -> None:
    with pytest.raises(S3Error) as error:
        read_claim(RequestTarget("GET", "/", "", headers), {}, now_ms=SystemClock().now_ms())
    assert error.value.code == code


# The example of "Signature calculations: transferring payload in multiple chunks" in AWS's documentation.
SEED = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
CHUNKS = [
    (65536, "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648"),
    (1024, "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497"),
    (0, "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9"),
]


DATA_BYTES = 65536 + 1024
"""The length of the data in the chunks."""
BODY_BYTES = 66824
"""The length of the example's body: the data with the lines of the chunks."""


def _build_claim(payload: str) -> SignatureClaim:
    return SignatureClaim("AKIAIOSFODNN7EXAMPLE", "", "20130524T000000Z", "us-east-1", ("host",), SEED, payload)


def _build_decoder(payload: str = SIGNED, length: int = DATA_BYTES) -> ChunkDecoder:
    claim = _build_claim(payload)
    return ChunkDecoder(claim, derive_signing_key(SECRET, claim.scope), length)


def _build_example() -> bytes:
    return b"".join(
        b"%x;chunk-signature=%s\r\n%s\r\n" % (size, signature.encode(), b"a" * size) for size, signature in CHUNKS
    )


@given(cuts=st.lists(st.integers(0, BODY_BYTES), max_size=6))
def test_signed_chunks_are_decoded_in_pieces_of_any_size(cuts: list[int]) -> None:
    body, decoder = _build_example(), _build_decoder()
    edges = [0, *sorted(cuts), len(body)]
    pieces = [piece for start, end in pairwise(edges) for piece in decoder.feed(body[start:end])]
    assert b"".join(pieces) == b"a" * DATA_BYTES
    assert decoder.finish() == {}


@given(position=st.integers(0, BODY_BYTES - 1), byte=st.integers(1, 255))
def test_body_with_a_changed_byte_is_never_completed(position: int, byte: int) -> None:
    body = bytearray(_build_example())
    body[position] ^= byte
    decoder, received_bytes = _build_decoder(), 0
    try:
        for start in range(0, len(body), 5000):  # The pieces are not aligned with the chunks.
            received_bytes += sum(map(len, decoder.feed(bytes(body[start : start + 5000]))))
        decoder.finish()
    except S3Error:
        # The decoder withholds the last piece of a changed chunk, unless only bytes after the data were changed.
        assert received_bytes < DATA_BYTES or position > DATA_BYTES
    else:
        # The signature covers neither the case of a size's digits nor the last line end.
        assert received_bytes == DATA_BYTES


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"3\r\nabc",
        b"3\r\nabc\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"4\r\nabcd\r\n0\r\n\r\n",
        b"2\r\nab\r\n0\r\n\r\n",
        b"-3\r\nabc\r\n0\r\n\r\n",
        b"x" * 2000,
        b"3\r\nabc\r\n0\r\nnothing\r\n\r\n",
        b"3\r\nabc\r\n0\r\n" + b"x:" + b"y" * 5000,
        b"3;chunk-signature=" + b"0" * 64 + b"\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_malformed_chunked_body_is_rejected(body: bytes) -> None:
    decoder = _build_decoder(UNSIGNED_TRAILER, 3)
    with pytest.raises(S3Error):
        (decoder.feed(body), decoder.finish())


def test_trailers_are_read_and_their_signature_is_verified() -> None:
    decoder = _build_decoder(UNSIGNED_TRAILER, 3)
    assert decoder.feed(b"3\r\nabc\r\n0\r\nx-amz-checksum-crc32:NSRBwg==\r\n\r\n") == [b"abc"]
    assert decoder.finish() == {"x-amz-checksum-crc32": "NSRBwg=="}
    signed_decoder = _build_decoder(SIGNED_TRAILER)
    trailers = b"x-amz-checksum-crc32:NSRBwg==\r\nx-amz-trailer-signature:" + b"0" * 64
    signed_decoder.feed(_build_example()[:-2] + trailers + b"\r\n\r\n")
    with pytest.raises(S3Error, match="signature"):
        signed_decoder.finish()


def test_credentials_are_the_same_on_every_replica_and_expire() -> None:
    clock = SimulatedClock(1)
    keys = GatewayKeys(make_fixed_keyring(clock=clock), clock, lifetime_s=3600)
    credentials = keys.issue("uuid", "s3://b/t", writable=True, principal_name="w")
    assert 1_800_000 <= credentials.expires_ms - clock.now_ms() <= 3_600_000
    replica = GatewayKeys(make_fixed_keyring(clock=clock), clock, lifetime_s=60)
    grant, secret = replica.verify(credentials.token, credentials.access_key_id)
    assert (grant.location, grant.writable, secret) == ("s3://b/t", True, credentials.secret_access_key)
    assert keys.issue("uuid", "s3://b/t", writable=True, principal_name="w") == credentials
    keys_of_other_keyring = GatewayKeys(make_fixed_keyring(b"o", clock), clock, lifetime_s=3600)
    other_credentials = [
        keys.issue("uuid", "s3://b/t", writable=False, principal_name="w"),
        keys.issue("uuid", "s3://b/u", writable=True, principal_name="w"),
        keys.issue("other", "s3://b/t", writable=True, principal_name="w"),
        keys_of_other_keyring.issue("uuid", "s3://b/t", writable=True, principal_name="w"),
    ]
    assert len({item.secret_access_key for item in [credentials, *other_credentials]}) == 5
    assert len({item.access_key_id for item in [credentials, *other_credentials]}) == 5
    with pytest.raises(Forbidden):
        keys.verify(other_credentials[3].token, other_credentials[3].access_key_id)
    with pytest.raises(Forbidden):
        keys.verify(credentials.token, other_credentials[0].access_key_id)
    for position in range(0, len(credentials.token), 7):
        letter = "B" if credentials.token[position] == "A" else "A"
        changed_token = credentials.token[:position] + letter + credentials.token[position + 1 :]
        with pytest.raises(Forbidden):
            keys.verify(changed_token, credentials.access_key_id)
    clock.advance(3_601_000)
    with pytest.raises(ExpiredGrant):
        keys.verify(credentials.token, credentials.access_key_id)
