"""Reads names, properties of namespaces, and locations of metadata files from the other catalog.

Requests are sent only to the URI in the settings, which the operator has allowed. Redirects are not followed, and the
URI in the configuration of the other catalog is ignored. An answer is cached for `federation_fresh_s`. After this
time, the answer is requested again, with a conditional request if the other catalog supports it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlencode

import aiohttp
import msgspec
from yarl import URL

from seamark.cache.single_flight import SingleFlight
from seamark.formats.protocol.wire import NAMESPACE_SEPARATOR, check_route_prefix
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, RetryLater
from seamark.formats.runtime.tls import build_client_context
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import EntryKind, NamespacePath
from seamark.metaserver.warehouses.federation.breaker import CatalogBreaker

_CONNECT_S = 5.0
"""The maximum time to open a connection to the other catalog."""
_ANSWER_BYTES_MAX = 256 << 20
_ANSWERS_MAX = 20_000
"""The maximum number of cached answers."""
_ANSWERS_BYTES_MAX = 64 << 20
"""The maximum size of the cached answers. A listing can have 200,000 names."""
_VALUE_BYTES = 64
"""The size of a cached name or property in memory, without its characters."""
_FAILURE_S = 5.0
"""The time after a failed login, or a failed read of the configuration, before the next attempt."""
_NAMES_MAX = 200_000
"""The maximum number of names in one listing."""
_ENTRIES_PER_PAGE = 1000
_TOKEN_MARGIN_S = 30.0
"""The time before the end of a token at which a new token is requested."""
_EXPIRED_LOGIN_STATUSES = (401, 419)
"""The statuses that ask for a new token. Iceberg's REST protocol uses 419 for an expired token."""
_CONNECTIONS_MAX = 32
_SHOWN_CHARACTERS_MAX = 200
T = TypeVar("T")


class _Config(msgspec.Struct):
    defaults: dict[str, Any] = {}
    overrides: dict[str, Any] = {}


class _Token(msgspec.Struct):
    access_token: str
    expires_in: float | None = None


class _NamespacePage(msgspec.Struct, rename="kebab"):
    namespaces: list[NamespacePath] = []
    next_page_token: str | None = None


class _Identifier(msgspec.Struct):
    name: str


class _EntryPage(msgspec.Struct, rename="kebab"):
    identifiers: list[_Identifier] = []
    next_page_token: str | None = None


class _Namespace(msgspec.Struct):
    properties: dict[str, str] | None = None


class _LoadedEntry(msgspec.Struct, rename="kebab"):
    metadata_location: str | None = None


class _Answer(NamedTuple):
    status: int
    body: bytes
    etag: str


class _CachedAnswer(NamedTuple):
    value: Any
    etag: str
    read_s: float

    @property
    def size_bytes(self) -> int:
        """The approximate size of the value in memory. The value is None, a text, names, paths or properties."""
        if not self.value or isinstance(self.value, str):
            return _VALUE_BYTES + len(self.value or "")
        items = self.value.items() if isinstance(self.value, dict) else self.value
        return sum(_VALUE_BYTES + (len(item) if isinstance(item, str) else sum(map(len, item))) for item in items)


class _NoAnswer(Exception):
    """Raised if the catalog from which a federated warehouse reads its names sends no answer."""


class _Failure(NamedTuple):
    message: str
    until_s: float


class OtherCatalog:
    """The catalog whose tables a federated warehouse shows. An instance belongs to one event loop.

    Each method raises RetryLater if the other catalog does not answer, or refuses the login.
    """

    def __init__(self, settings: Settings, clock: Clock, session: aiohttp.ClientSession) -> None:
        self._uri = settings.federation_uri.rstrip("/")
        self._settings = settings
        self._clock = clock
        self._session = session
        self._root = ""
        self._separator = NAMESPACE_SEPARATOR
        self._token, self._token_end_s = settings.federation_token, float("inf")
        self._answers: OrderedDict[Hashable, _CachedAnswer] = OrderedDict()
        self._answers_bytes = 0
        self._flights: SingleFlight[Hashable, Any] = SingleFlight()
        """The running requests, whose answers concurrent calls share."""
        self._failures: dict[str, _Failure] = {}
        """The last failure of each step that all requests need, by the name of the step."""
        self._requests = 0
        self._breaker = CatalogBreaker(self._is_answering)

    async def close(self) -> None:
        """End the background work."""
        await self._breaker.close()

    async def _is_answering(self) -> bool:
        """Return whether the other catalog answers a request without a login, with any status."""
        try:
            async with asyncio.timeout(self._settings.federation_timeout_s):
                await self._exchange("GET", "/v1/config", {})
        except (_NoAnswer, TimeoutError):
            return False
        except RetryLater:
            return True  # The catalog has answered, even though the answer is too large.
        return True

    @property
    def uri(self) -> str:
        return self._uri

    @asynccontextmanager
    async def limit_request(self) -> AsyncIterator[None]:
        """Limit the time and the number of requests of clients that use the other catalog, while the context is active.

        All warehouses share the slots of the server, so the requests that wait for one catalog may not take all slots.

        Raises:
            RetryLater: Too many requests wait for the other catalog, or it did not answer in time.
        """
        limit, timeout_s = self._settings.federation_requests_limit, self._settings.federation_timeout_s
        if self._requests >= limit:
            raise RetryLater(
                f"{limit:,} requests wait for the catalog {self._uri} of this warehouse, as many as the setting "
                "federation_requests_limit allows; try again shortly"
            )
        self._requests += 1
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise RetryLater(
                f"The catalog {self._uri} of this warehouse did not answer within {timeout_s:g} seconds"
            ) from None
        finally:
            self._requests -= 1

    async def find_namespace(self, path: NamespacePath) -> dict[str, str] | None:
        """Return the properties of a namespace, or None if it does not exist.

        A path with the separator of the other catalog in a level also counts as missing, because the other catalog
        could read it as a path with more levels (`_is_ambiguous`).

        Raises:
            RetryLater: The other catalog does not answer.
        """
        if await self._is_ambiguous(path):
            return None

        async def read(_: _CachedAnswer | None) -> _CachedAnswer:
            answer = await self._get(f"/namespaces/{self._encode(path)}")
            is_missing = answer.status == 404
            return self._make_cached_answer(None if is_missing else self._decode(answer, _Namespace).properties or {})

        properties: dict[str, str] | None = await self._read(("namespace", path), read)
        return properties

    async def list_namespaces(self, parent: NamespacePath, *, skip_cache: bool = False) -> list[NamespacePath]:
        """Return the namespaces directly below a namespace, in code-point order of their last level.

        The list is empty if the other catalog could read the path of the namespace as a path with more levels
        (`_is_ambiguous`).

        Args:
            parent: The namespace, or `()` for the namespaces with one level.
            skip_cache: Whether to ignore cached answers.

        Raises:
            RetryLater: The other catalog does not answer, or lists too many names.
        """
        if await self._is_ambiguous(parent):
            return []

        async def read(_: _CachedAnswer | None) -> _CachedAnswer:
            query = {"parent": self._separator.join(parent)} if parent else {}
            paths = [
                path
                async for answer in self._list_pages("/namespaces", query)
                for path in self._decode(answer, _NamespacePage).namespaces
            ]
            # Ignore paths on other levels, and levels that contain the separator (`_is_ambiguous`).
            children = {
                path
                for path in paths
                if path[:-1] == parent and path[-1:] and path[-1] and self._separator not in path[-1]
            }
            return self._make_cached_answer(sorted(children, key=lambda path: path[-1]))

        children: list[NamespacePath] = await self._read(("namespaces", parent), read, skip_cache=skip_cache)
        return children

    async def list_entries(
        self, kind: EntryKind, namespace: NamespacePath, *, skip_cache: bool = False, fresh_s: float = 0.0
    ) -> list[str]:
        """Return the names of the tables or views of a namespace, in code-point order.

        The list is empty if the other catalog could read the path of the namespace as a path with more levels
        (`_is_ambiguous`).

        Args:
            kind: The kind of the entries.
            namespace: The namespace of the entries.
            skip_cache: Whether to ignore cached answers.
            fresh_s: The maximum age of a cached answer, if it is longer than `federation_fresh_s`.

        Raises:
            RetryLater: The other catalog does not answer, or lists too many names.
        """
        if await self._is_ambiguous(namespace):
            return []

        async def read(_: _CachedAnswer | None) -> _CachedAnswer:
            path = f"/namespaces/{self._encode(namespace)}/{kind.value}s"
            names = {
                identifier.name
                async for answer in self._list_pages(path, {})
                for identifier in self._decode(answer, _EntryPage).identifiers
            }
            return self._make_cached_answer(sorted(names))

        names: list[str] = await self._read(("entries", kind, namespace), read, skip_cache=skip_cache, fresh_s=fresh_s)
        return names

    async def find_entry(
        self, kind: EntryKind, namespace: NamespacePath, name: str, *, skip_cache: bool = False
    ) -> str | None:
        """Return the location of the metadata file of a table or view, or None if it does not exist.

        The result is also None if the other catalog could read the path of the namespace as a path with more levels
        (`_is_ambiguous`).

        Args:
            kind: The kind of the entry.
            namespace: The namespace of the entry.
            name: The name of the entry in the namespace.
            skip_cache: Whether to ignore cached answers.

        Raises:
            RetryLater: The other catalog does not answer, or its answer does not contain the location.
        """
        if await self._is_ambiguous(namespace):
            return None

        async def read(cached_answer: _CachedAnswer | None) -> _CachedAnswer:
            path = f"/namespaces/{self._encode(namespace)}/{kind.value}s/{quote(name, safe='')}"
            # Only the location is needed, so request the shortest metadata. Views have no such parameter.
            query = {"snapshots": "refs"} if kind is EntryKind.TABLE else {}
            answer = await self._get(path, query, "" if cached_answer is None else cached_answer.etag)
            if answer.status == 304 and cached_answer is not None:
                return self._make_cached_answer(cached_answer.value, cached_answer.etag)
            if answer.status == 404:
                return self._make_cached_answer(None)
            location = self._decode(answer, _LoadedEntry).metadata_location
            if not location:
                raise RetryLater(f"The catalog {self._uri} does not say where the metadata file of {name} is")
            return self._make_cached_answer(location, answer.etag)

        location: str | None = await self._read(("entry", kind, namespace, name), read, skip_cache=skip_cache)
        return location

    async def _read(
        self,
        key: Hashable,
        read_value: Callable[[_CachedAnswer | None], Awaitable[_CachedAnswer]],
        *,
        skip_cache: bool = False,
        fresh_s: float = 0.0,
    ) -> Any:
        """Return a cached answer if it is fresh, or else request the answer.

        A call with `skip_cache` does not share a request that was sent before the call.
        """

        async def refresh() -> Any:
            new_answer = await read_value(self._answers.get(key))
            if (former_answer := self._answers.pop(key, None)) is not None:
                self._answers_bytes -= former_answer.size_bytes
            self._answers[key] = new_answer
            self._answers_bytes += new_answer.size_bytes
            while len(self._answers) > _ANSWERS_MAX or self._answers_bytes > _ANSWERS_BYTES_MAX:
                self._answers_bytes -= self._answers.popitem(last=False)[1].size_bytes
            return new_answer.value

        if skip_cache:
            return await refresh()
        last_answer = self._answers.get(key)
        fresh_s = max(fresh_s, self._settings.federation_fresh_s)
        if last_answer is not None and self._clock.monotonic() - last_answer.read_s < fresh_s:
            return last_answer.value
        return await self._flights.run(key, refresh)

    def _make_cached_answer(self, value: Any, etag: str = "") -> _CachedAnswer:
        """Return a value with the present time as the time at which it was read."""
        return _CachedAnswer(value, etag, self._clock.monotonic())

    async def _list_pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[_Answer]:
        """Yield the pages of a listing. Yield nothing if the namespace does not exist.

        Raises:
            RetryLater: The other catalog does not answer, or lists too many names.
        """
        token, requested_names = "", 0
        while requested_names < _NAMES_MAX:
            answer = await self._get(path, {**query, "pageSize": str(_ENTRIES_PER_PAGE), "pageToken": token})
            if answer.status == 404:
                return
            yield answer
            token = self._decode(answer, _NextPage).next_page_token or ""
            if not token:
                return
            requested_names += _ENTRIES_PER_PAGE
        raise RetryLater(f"The catalog {self._uri} lists more than {_NAMES_MAX:,} names in one namespace")

    async def _get(self, path: str, query: Mapping[str, str] | None = None, etag: str = "") -> _Answer:
        """Return the answer to a GET request below the prefix of the routes.

        Raises:
            RetryLater: The status is neither 200, 304 nor 404, or there is no answer.
        """
        await self._load_route_prefix()
        headers = {"If-None-Match": etag} if etag else {}
        answer = await self._send("GET", f"{self._root}{path}", query or {}, headers)
        if answer.status not in (200, 304, 404):
            raise self._make_error(answer)
        return answer

    async def _load_route_prefix(self) -> None:
        """Read the prefix of the routes if it is not known yet."""
        if not self._root:
            await self._run_shared_step("the configuration", self._read_config)

    async def _read_config(self) -> None:
        """Read the prefix of the routes, and the separator of the levels of namespaces, from the configuration.

        Raises:
            RetryLater: The other catalog gives no valid configuration.
        """
        warehouse = self._settings.federation_warehouse
        answer = await self._send("GET", "/v1/config", {"warehouse": warehouse} if warehouse else {}, {})
        if answer.status != 200:
            raise self._make_error(answer)
        config = self._decode(answer, _Config)
        properties = {**config.defaults, **config.overrides}
        self._separator = unquote(str(properties.get("namespace-separator") or NAMESPACE_SEPARATOR))
        try:
            prefix = check_route_prefix(str(properties.get("prefix") or ""))
        except BadRequest as error:
            raise RetryLater(f"The configuration of the catalog {self._uri} is invalid: {error.message}") from None
        self._root = f"/v1/{quote(prefix, safe='/')}" if prefix else "/v1"

    async def _run_shared_step(self, step: str, run_step: Callable[[], Awaitable[T]]) -> T:
        """Run a step that all requests need, and share its result with concurrent requests.

        After a failure, the step is not tried again for `_FAILURE_S`.

        Raises:
            RetryLater: The step failed in this call or shortly before.
        """
        failure = self._failures.get(step)
        if failure is not None and self._clock.monotonic() < failure.until_s:
            raise RetryLater(failure.message)

        async def run() -> T:
            try:
                return await run_step()
            except RetryLater as error:
                self._failures[step] = _Failure(error.message, self._clock.monotonic() + _FAILURE_S)
                raise

        result: T = await self._flights.run(step, run)
        return result

    async def _send(self, method: str, path: str, query: Mapping[str, str], headers: dict[str, str]) -> _Answer:
        """Send a request with the login. If the token has expired, get a new token and send the request again."""
        for attempt in range(2):
            token = await self._find_token()
            login = {"Authorization": f"Bearer {token}"} if token else {}
            answer = await self._request(method, f"{path}?{urlencode(query)}", {**headers, **login})
            if answer.status not in _EXPIRED_LOGIN_STATUSES or not self._settings.federation_credential or attempt:
                return answer
            if token == self._token:  # Otherwise, another request has read a new token meanwhile.
                self._token_end_s = 0.0
        raise AssertionError("the loop returns")

    async def _request(self, method: str, path: str, headers: dict[str, str], data: bytes | None = None) -> _Answer:
        """Send a request, and return the answer with any status.

        Raises:
            RetryLater: The other catalog does not answer this request. Or it did not answer the last probe, so that no
                request is sent.
        """
        self._breaker.check()
        try:
            return await self._exchange(method, path, headers, data)
        except _NoAnswer as error:
            self._breaker.report_failure(str(error))
            raise RetryLater(str(error)) from None

    async def _exchange(self, method: str, path: str, headers: dict[str, str], data: bytes | None = None) -> _Answer:
        """Send a request, and return the answer. The method does not check the circuit breaker, unlike `_request`.

        Raises:
            _NoAnswer: The other catalog accepts no connection, or sends no complete answer in time.
            RetryLater: The answer is too large.
        """
        url = URL(f"{self._uri}{path}", encoded=True)
        try:
            async with self._session.request(method, url, headers=headers, data=data, allow_redirects=False) as answer:
                chunks, size = [], 0
                async for chunk in answer.content.iter_any():
                    size += len(chunk)
                    if size > _ANSWER_BYTES_MAX:
                        raise RetryLater(
                            f"An answer of the catalog {self._uri} has more than {_ANSWER_BYTES_MAX:,} bytes"
                        )
                    chunks.append(chunk)
                return _Answer(answer.status, b"".join(chunks), answer.headers.get("ETag", ""))
        except aiohttp.ServerTimeoutError as error:
            is_connected = isinstance(error, aiohttp.SocketTimeoutError)
            limit_s = self._settings.federation_read_timeout_s if is_connected else _CONNECT_S
            raise _NoAnswer(
                f"The catalog {self._uri} of this warehouse "
                f"{'sent nothing' if is_connected else 'did not accept a connection'} for {limit_s:g} seconds"
            ) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise _NoAnswer(
                f"The catalog {self._uri} of this warehouse does not answer ({reason[:_SHOWN_CHARACTERS_MAX]})"
            ) from None

    async def _find_token(self) -> str:
        """Return the token in the settings, or else a token for the credential in the settings."""
        if not self._settings.federation_credential:
            return self._token
        if self._token and self._clock.monotonic() < self._token_end_s:
            return self._token
        return await self._run_shared_step("the login", self._request_token)

    async def _request_token(self) -> str:
        """Exchange the credential in the settings for a token, and keep the token until shortly before its end.

        Raises:
            RetryLater: The federated catalog, which issues the token, gives none.
        """
        client_id, _, secret = self._settings.federation_credential.rpartition(":")
        form = {"grant_type": "client_credentials", "client_id": client_id, "client_secret": secret}
        if self._settings.federation_scope:
            form["scope"] = self._settings.federation_scope
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        answer = await self._request("POST", "/v1/oauth/tokens", headers, urlencode(form).encode())
        if answer.status != 200:
            raise self._make_error(answer)
        token = self._decode(answer, _Token)
        self._token = token.access_token
        lifetime_s = float("inf") if token.expires_in is None else token.expires_in - _TOKEN_MARGIN_S
        self._token_end_s = self._clock.monotonic() + lifetime_s
        return self._token

    def _make_error(self, answer: _Answer) -> RetryLater:
        # Do not quote the answer, which may contain the login.
        hint = (
            "; check the login in its credentials"
            if answer.status in (*_EXPIRED_LOGIN_STATUSES, 403)
            else "; try again"
        )
        return RetryLater(f"The catalog {self._uri} of this warehouse answers {answer.status}{hint}")

    def _decode(self, answer: _Answer, type_: type[T]) -> T:
        try:
            return convert_json(answer.body, type_)
        except msgspec.MsgspecError:
            raise RetryLater(f"The catalog {self._uri} of this warehouse sent an answer that is not valid") from None

    async def _is_ambiguous(self, path: NamespacePath) -> bool:
        """Return whether the federated catalog could read the path as a path with more levels.

        The federated catalog chooses the separator of levels, and a level can contain it. With the separator `.`,
        rights on `hr` would not apply to a request for `hr.pay` as one level.
        """
        await self._load_route_prefix()  # Also reads the separator.
        return any(self._separator in level for level in path)

    def _encode(self, path: NamespacePath) -> str:
        return quote(self._separator, safe="").join(quote(level, safe="") for level in path)


class _NextPage(msgspec.Struct, rename="kebab"):
    next_page_token: str | None = None


@asynccontextmanager
async def open_other_catalog(settings: Settings, clock: Clock) -> AsyncIterator[OtherCatalog]:
    """Open a client of the catalog in `federation_uri`."""
    connector = aiohttp.TCPConnector(ssl=build_client_context() or True, limit=_CONNECTIONS_MAX)
    timeout = aiohttp.ClientTimeout(
        total=settings.federation_timeout_s,
        connect=None,  # `federation_timeout_s` limits the wait for a connection of the pool.
        sock_connect=_CONNECT_S,
        sock_read=settings.federation_read_timeout_s,
    )
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=True) as session:
        catalog = OtherCatalog(settings, clock, session)
        try:
            yield catalog
        finally:
            await catalog.close()
