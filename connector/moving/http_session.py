"""HTTP requests to another catalog: with limits of time and size, repeated while the catalog is busy, no redirects.

PyIceberg makes a session of `requests`, which this module limits. For each request, `requests` prepares headers,
cookies, proxies and TLS again. This takes more than half of the CPU time of a request, so `DirectRequests` sends GET
requests over the connections of the session without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from requests.utils import select_proxy
from urllib3.util.retry import Retry

_CONNECT_S, _ANSWER_S = 10.0, 60.0
_BODY_S = 300.0
"""The maximum time in which the body of an answer is read."""
_BODY_BYTES_MAX = 256 << 20
_CHUNK_BYTES = 64 << 10
_TRIES_MAX = 5
_BACKOFF_S = 0.5
_RETRY_AFTER_S_MAX = 60.0
"""The maximum time for which a busy server can delay the next try. urllib3 would wait for hours."""
BUSY_STATUSES = (429, 502, 503, 504)
_REDIRECTS = (301, 302, 303, 307, 308)
SHOWN_CHARACTERS_MAX = 300


class _BoundedRetry(Retry):
    """The tries of a request, with a limited time between them."""

    def parse_retry_after(self, retry_after: str) -> float:
        return min(super().parse_retry_after(retry_after), _RETRY_AFTER_S_MAX)


class BoundedAdapter(HTTPAdapter):
    """An HTTP adapter that repeats GET and HEAD requests while the server is busy.

    It also limits the time and the size of answers, which PyIceberg does not.

    Args:
        connections: The maximum number of requests at the same time.
        sign: Adds a signature to the headers of a request. None if requests are not signed.
    """

    def __init__(self, connections: int, sign: Callable[[requests.PreparedRequest], object] | None = None) -> None:
        self._sign = sign
        retries = _BoundedRetry(
            total=_TRIES_MAX,
            connect=1,
            backoff_factor=_BACKOFF_S,
            status_forcelist=BUSY_STATUSES,
            allowed_methods=("GET", "HEAD"),
            raise_on_status=False,
        )
        super().__init__(pool_connections=2, pool_maxsize=connections, max_retries=retries)

    def add_headers(self, request: requests.PreparedRequest, **options: Any) -> None:
        if self._sign is not None:
            self._sign(request)

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        response = super().send(request, True, timeout or (_CONNECT_S, _ANSWER_S), verify, cert, proxies)
        if not stream:
            # The property `content` of the response returns this instead of reading without a limit.
            response._content = _read_limited(response.iter_content(_CHUNK_BYTES), response.close)
        return response


class DirectRequests:
    """Sends GET requests to one host over the connections of a session.

    The requests have the headers and the TLS settings of the session, but no cookies. Several threads may use an
    instance at the same time.

    Args:
        session: A session that reaches the host without a proxy, see `can_reach`.
        adapter: The adapter of the session for the host.
        url: A URL of the host.
    """

    def __init__(self, session: requests.Session, adapter: BoundedAdapter, url: str) -> None:
        settings = session.merge_environment_settings(url, {}, None, None, None)
        request = session.prepare_request(requests.Request("GET", url))
        verify, cert = settings["verify"], settings["cert"]
        self._connections = adapter.get_connection_with_tls_context(request, verify, None, cert)
        adapter.cert_verify(self._connections, url, verify, cert)
        self._retries = adapter.max_retries
        self._headers = {name: str(value) for name, value in session.headers.items()}

    @staticmethod
    def can_reach(session: requests.Session, adapter: BoundedAdapter, url: str) -> bool:
        """Return whether the session sends requests to the URL by this adapter, without a proxy and without cookies."""
        proxies = session.merge_environment_settings(url, {}, None, None, None)["proxies"]
        return session.get_adapter(url) is adapter and not select_proxy(url, proxies) and not session.cookies

    def get(self, url: str, query: Mapping[str, str], login: str | None) -> requests.Response:
        """Send a request, and return the answer with any status.

        Args:
            url: A URL of the host.
            query: The parameters of the query.
            login: The header `Authorization`, or None.

        Raises:
            RequestException: The host does not answer, redirects, or sends too many bytes.
        """
        parts = urlsplit(url)
        path = f"{parts.path}?{urlencode(query)}" if query else parts.path
        headers = self._headers if login is None else {**self._headers, "Authorization": login}
        answer = requests.Response()
        try:
            response = self._connections.urlopen(
                "GET",
                path,
                headers=headers,
                redirect=False,
                retries=self._retries,
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=_ANSWER_S),
                preload_content=False,
            )
            answer._content = _read_limited(response.stream(_CHUNK_BYTES, decode_content=True), response.close)
        except urllib3.exceptions.HTTPError as error:
            raise requests.ConnectionError(str(error)) from None
        answer.status_code, answer.encoding = response.status, "utf-8"
        answer.headers["Location"] = response.headers.get("Location", "")
        if answer.status_code in _REDIRECTS:
            refuse_redirect(answer)
        return answer


def _read_limited(chunks: Iterable[bytes], close: Callable[[], object]) -> bytes:
    """Return the body of an answer.

    Args:
        chunks: The parts of the body.
        close: Closes the connection.

    Raises:
        RequestException: The body is too long or too slow.
    """
    ends_s, content = time.monotonic() + _BODY_S, bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > _BODY_BYTES_MAX:
            close()
            raise requests.RequestException(f"an answer has more than {_BODY_BYTES_MAX >> 20} MiB")
        if time.monotonic() > ends_s:
            close()
            raise requests.RequestException(f"an answer takes more than {_BODY_S:.0f} s")
    return bytes(content)


def refuse_redirect(response: requests.Response, **_: Any) -> None:
    """Check that an answer is not a redirect, which could send the login to another host.

    Raises:
        TooManyRedirects: The answer is a redirect.
    """
    if response.is_redirect:
        location = " ".join(response.headers["Location"][:SHOWN_CHARACTERS_MAX].split())
        raise requests.TooManyRedirects(f"it redirects to {location}; use that address if you trust it")


def read_environment_once(session: requests.Session) -> None:
    """Make a session read the proxies of the environment once for each host.

    Otherwise it reads all variables for each request, which takes a fifth of the CPU time of a request. A request with
    its own proxies is not changed. The proxies are copied, because `requests` may change them.
    """
    merge = session.merge_environment_settings
    merged_settings: dict[tuple[Any, ...], Mapping[str, Any]] = {}

    def merge_once(
        url: str, proxies: dict[str, str] | None, stream: bool | None, verify: Any, cert: Any
    ) -> dict[str, Any]:
        if proxies:
            return merge(url, proxies, stream, verify, cert)
        parts = urlsplit(url)
        key = (parts.scheme, parts.netloc, stream, verify, cert)
        if key not in merged_settings:
            merged_settings[key] = merge(url, {}, stream, verify, cert)
        settings = merged_settings[key]
        return {**settings, "proxies": dict(settings["proxies"])}

    session.merge_environment_settings = merge_once  # type: ignore[method-assign]
