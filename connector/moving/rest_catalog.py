"""Finds the tables of an Iceberg REST catalog for an import. AWS Glue is such a catalog, with SigV4 signatures.

PyIceberg logs in, signs requests and makes the URLs. The metadata in the answers is not parsed, because only the
location of the metadata file is needed, and PyIceberg does not support all types of format version 3.

The other catalog is not trusted. PyIceberg would take any property from its configuration: another address, another
server for the login, or a Python class to call. So only properties that describe its routes are taken from it, and
redirects are not followed. An address is taken only if the address from the user is below it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import requests
from pyiceberg.catalog import URI
from pyiceberg.catalog.rest import (
    NAMESPACE_SEPARATOR_PROPERTY,
    PREFIX,
    Capability,
    Endpoint,
    Endpoints,
    IdentifierKind,
    RestCatalog,
)
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    NoSuchNamespaceError,
    RESTError,
    ServiceUnavailableError,
    TooManyRequestsError,
    UnauthorizedError,
)

from seamark.connector.moving.http_session import (
    BUSY_STATUSES,
    SHOWN_CHARACTERS_MAX,
    BoundedAdapter,
    DirectRequests,
    read_environment_once,
    refuse_redirect,
)
from seamark.connector.moving.source import (
    CatalogRefusal,
    CatalogUnavailable,
    EntryMissing,
    FoundTables,
    Levels,
    find_each,
)
from seamark.formats.protocol.wire import check_path_separator, check_route_prefix
from seamark.formats.runtime.decoding import convert_json, convert_values
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.tls import CA_VARIABLE, find_or_create_authorities_file

_LOGIN_ENDED_STATUSES = (401, 419)
_UNAVAILABLE_STATUSES = (*_LOGIN_ENDED_STATUSES, *BUSY_STATUSES)
_PAGES_MAX = 100_000
"""The maximum number of pages of one listing."""
_LEVELS_MAX = 32
"""The maximum number of levels of a namespace."""
_ROUTE_PROPERTIES = (PREFIX, NAMESPACE_SEPARATOR_PROPERTY)
"""The properties that the configuration of the other catalog may set."""
T = TypeVar("T")


class _LoadedEntry(msgspec.Struct, rename="kebab"):
    metadata_location: str | None = None


class _NextPage(msgspec.Struct, rename="kebab"):
    next_page_token: str | None = None


class _NamespacePage(msgspec.Struct):
    namespaces: list[Levels] = []


class _Identifier(msgspec.Struct):
    name: str


class _EntryPage(msgspec.Struct):
    identifiers: list[_Identifier] = []


class _ErrorBody(msgspec.Struct):
    message: str = ""


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody


class RestConnection(RestCatalog):
    """A connection to an Iceberg REST catalog. Several threads may use it at the same time."""

    def __init__(self, connections: int, properties: Mapping[str, str]) -> None:
        self._connections = connections
        self._adapter = BoundedAdapter(connections)
        super().__init__("other", **properties)
        is_direct = DirectRequests.can_reach(self._session, self._adapter, self.uri)
        self._direct = DirectRequests(self._session, self._adapter, self.uri) if is_direct else None

    def _config_headers(self, session: requests.Session) -> None:
        """Set the headers of a new session, and limit its requests.

        PyIceberg calls this method before the session sends the first request, which may be the login.
        """
        super()._config_headers(session)
        if os.environ.get(CA_VARIABLE):
            session.verify = find_or_create_authorities_file() or True
        for scheme in ("http://", "https://"):
            session.mount(scheme, self._adapter)
        session.hooks["response"].append(refuse_redirect)
        read_environment_once(session)

    def _init_sigv4(self, session: requests.Session) -> None:
        """Sign the requests of a session with SigV4, and limit them."""
        super()._init_sigv4(session)
        signer: Any = session.adapters[self.uri]
        session.mount(self.uri, BoundedAdapter(self._connections, signer.add_headers))

    def _fetch_config(self) -> None:
        """Read the configuration of the other catalog, and take only the properties that describe its routes.

        Other properties, such as keys of the storage, could change how this process uses its own login and storage. The
        address of the routes is checked by `_choose_address`.

        Raises:
            CatalogRefusal: The configuration is invalid.
        """
        own_properties = dict(self.properties)
        try:
            super()._fetch_config()
        except (AttributeError, TypeError) as error:
            raise CatalogRefusal(f"The configuration of the other catalog is invalid: {_shorten(str(error))}") from None
        routes = {name: self.properties[name] for name in _ROUTE_PROPERTIES if name in self.properties}
        try:
            check_route_prefix(convert_values(routes, dict[str, str]).get(PREFIX, ""))
            check_path_separator(self._namespace_separator)
        except (msgspec.ValidationError, BadRequest) as error:
            raise CatalogRefusal(f"The configuration of the other catalog is invalid: {_shorten(str(error))}") from None
        self.uri = _choose_address(own_properties[URI], self.properties.get(URI))
        self.properties = {**own_properties, **routes}

    def _get(self, url: str, query: Mapping[str, str]) -> requests.Response:
        """Send a GET request, and return the answer with any status. If the login has ended, log in again."""
        answer = self._send_get(url, query)
        if answer.status_code in _LOGIN_ENDED_STATUSES:
            self._refresh_token()
            answer = self._send_get(url, query)
        return answer

    def _send_get(self, url: str, query: Mapping[str, str]) -> requests.Response:
        if self._direct is None:
            return self._session.get(url, params=query)
        login = None if self._auth_manager is None else self._auth_manager.auth_header()
        return self._direct.get(url, query, login)

    def list_children(self, parent: Levels) -> list[Levels]:
        """Return the namespaces directly below a namespace. There are none if the namespace does not exist.

        PyIceberg encodes the parent twice, so it does not find the children of namespaces with special characters.

        Raises:
            CatalogRefusal: The catalog refuses the request.
        """
        query = {"parent": self._namespace_separator.join(parent)} if parent else {}
        children: list[Levels] = []
        for answer in self._read_pages(self.url(Endpoints.list_namespaces), query):
            if answer.status_code == 404 and parent and not self.namespace_exists(parent):
                return []
            _check_status(answer)
            children += _decode(answer, _NamespacePage).namespaces
        # A catalog that does not support the parameter `parent` returns the top-level namespaces.
        return list(dict.fromkeys(path for path in children if path[:-1] == parent and path))

    def list_names(self, endpoint: str, namespace: Levels) -> list[str]:
        """Return the names of the tables or views of a namespace.

        Raises:
            CatalogRefusal: The catalog refuses the request.
            EntryMissing: The namespace does not exist.
        """
        names: list[str] = []
        for answer in self._read_pages(self.url(endpoint, namespace=self._encode_namespace_path(namespace)), {}):
            if answer.status_code == 404:
                raise EntryMissing(f"The other catalog no longer has the namespace {'.'.join(namespace)}")
            _check_status(answer)
            names += [identifier.name for identifier in _decode(answer, _EntryPage).identifiers]
        return names

    def _read_pages(self, url: str, query: Mapping[str, str]) -> Iterator[requests.Response]:
        """Yield the answers of a listing, page by page.

        Raises:
            CatalogRefusal: The catalog returns the same page token twice, so the listing would not end, or the listing
                has more than `_PAGES_MAX` pages.
        """
        tokens: set[str] = set()
        params = dict(query)
        while len(tokens) < _PAGES_MAX:
            answer = self._get(url, params)
            yield answer
            token = _decode(answer, _NextPage).next_page_token
            if not token:
                return
            if token in tokens:
                raise CatalogRefusal("The other catalog repeats a page of its listing, so the listing would not end")
            tokens.add(token)
            params["pageToken"] = token
        raise CatalogRefusal(f"The other catalog lists more than {_PAGES_MAX:,} pages")

    def load_location(self, endpoint: str, kind: IdentifierKind, levels: Levels) -> str:
        """Return the location of the metadata file of a table or view.

        Raises:
            EntryMissing: The catalog does not have the table or view.
            CatalogRefusal: The catalog refuses the request, or does not state the location.
        """
        location = self.find_location(endpoint, kind, levels)
        if location is None:
            raise EntryMissing(f"The other catalog no longer has {'.'.join(levels)}")
        return location

    def find_location(self, endpoint: str, kind: IdentifierKind, levels: Levels) -> str | None:
        """Return the location of the metadata file of a table or view, or None if it does not exist.

        Raises:
            CatalogRefusal: The catalog refuses the request, or does not state the location.
        """
        url = self.url(endpoint, prefixed=True, **self._split_identifier_for_path(levels, kind))
        response = self._get(url, {"snapshots": "refs"} if kind is IdentifierKind.TABLE else {})
        if response.status_code == 404:
            return None
        _check_status(response)
        location = _decode(response, _LoadedEntry).metadata_location
        if not location:
            raise CatalogRefusal("The other catalog does not state the location of the metadata file")
        return location

    def post(self, endpoint: str, body: Mapping[str, Any], namespace: Levels = ()) -> requests.Response:
        """Send a POST request without retries, and return the answer, unless the catalog is unavailable.

        Args:
            endpoint: The path of the endpoint, with variables.
            body: The body of the request, as JSON.
            namespace: The namespace in the path, or () for a path without a namespace.

        Raises:
            CatalogUnavailable: The catalog is busy, or refuses the login.
        """
        variables = {"namespace": self._encode_namespace_path(namespace)} if namespace else {}
        response = self._session.post(self.url(endpoint, prefixed=True, **variables), json=body)
        if response.status_code in _UNAVAILABLE_STATUSES:
            _check_status(response)
        return response

    def supports(self, endpoint: Endpoint) -> bool:
        """Return whether the catalog lists the endpoint among those that it supports."""
        return endpoint in self._supported_endpoints


class RestSource:
    """The source of an import from an Iceberg REST catalog.

    Args:
        properties: The properties of PyIceberg's REST catalog, such as `uri`, `warehouse` and `token`.
        connections: The maximum number of requests at the same time.
        is_flat: Whether to list only the top-level namespaces.

    Raises:
        CatalogRefusal: A property is invalid.
        CatalogUnavailable: The catalog does not answer, or refuses the login.
    """

    def __init__(self, properties: Mapping[str, str], connections: int, *, is_flat: bool = False) -> None:
        self._is_flat = is_flat
        with translate_errors():
            self._catalog = RestConnection(connections, properties)

    def list_namespaces(self) -> Iterator[Levels]:
        parents: list[Levels] = [()]
        while parents:
            parent = parents.pop()
            if len(parent) > _LEVELS_MAX:
                raise CatalogRefusal(f"The namespace {'.'.join(parent)[:200]} has more than {_LEVELS_MAX} levels")
            with translate_errors():
                children = self._catalog.list_children(parent)
            yield from children
            if not self._is_flat:
                parents += children

    def load_properties(self, namespace: Levels) -> dict[str, str]:
        with translate_errors():
            properties = self._catalog.load_namespace_properties(namespace)
        return {name: str(value) for name, value in properties.items()}

    def list_tables(self, namespace: Levels) -> list[str]:
        with translate_errors():
            return self._catalog.list_names(Endpoints.list_tables, namespace)

    def list_views(self, namespace: Levels) -> list[str]:
        with translate_errors():
            if not self._catalog.supports(Capability.V1_LIST_VIEWS):
                return []
            return self._catalog.list_names(Endpoints.list_views, namespace)

    def find_tables(self, namespace: Levels, names: Sequence[str]) -> FoundTables:
        return find_each(self._find_table, namespace, names)

    def _find_table(self, namespace: Levels, name: str) -> str:
        with translate_errors():
            return self._catalog.load_location(Endpoints.load_table, IdentifierKind.TABLE, (*namespace, name))

    def find_view(self, namespace: Levels, name: str) -> str:
        with translate_errors():
            return self._catalog.load_location(Endpoints.load_view, IdentifierKind.VIEW, (*namespace, name))

    def close(self) -> None:
        self._catalog.close()


@contextmanager
def translate_errors() -> Iterator[None]:
    """Convert errors of PyIceberg in a block to EntryMissing, CatalogUnavailable or CatalogRefusal."""
    try:
        yield
    except NoSuchNamespaceError:
        raise EntryMissing("The other catalog no longer has the namespace") from None
    except requests.RequestException as error:
        raise CatalogUnavailable(f"The other catalog does not answer: {_shorten(str(error))}") from None
    except (AuthorizationExpiredError, ServiceUnavailableError, TooManyRequestsError, UnauthorizedError) as error:
        raise CatalogUnavailable(_shorten(str(error))) from None
    # PyIceberg raises a ValueError for an invalid property, and pydantic's subclass of it for an invalid answer.
    except (RESTError, ValueError, NotImplementedError) as error:
        raise CatalogRefusal(_shorten(str(error))) from None


def _choose_address(own_address: str, configured_address: object) -> str:
    """Return the address to which the paths of the REST catalog's requests are appended.

    The address in the configuration is used only if the user's address is below it, and otherwise ignored. For example,
    the configuration of Nessie at `https://HOST/iceberg/BRANCH` has the address `https://HOST/iceberg`.

    Args:
        own_address: The address from the user.
        configured_address: The address in the configuration that the REST catalog returns.
    """
    if not isinstance(configured_address, str):
        return own_address
    address = configured_address.rstrip("/")
    is_below = f"{own_address}/".startswith(f"{address}/") and urlsplit(own_address).netloc == urlsplit(address).netloc
    return address if is_below else own_address


def _check_status(answer: requests.Response) -> None:
    if answer.status_code == 200:
        return
    message = f"The other catalog answers {answer.status_code}: {read_message(answer)}"
    raise (CatalogUnavailable if answer.status_code in _UNAVAILABLE_STATUSES else CatalogRefusal)(message)


def _decode(answer: requests.Response, type_: type[T]) -> T:
    try:
        return convert_json(answer.content, type_)
    except msgspec.MsgspecError as error:
        raise CatalogRefusal(f"The other catalog sent an invalid answer: {error}") from None


def read_message(response: requests.Response) -> str:
    """Return the error message in a response, shortened for one line."""
    try:
        return _shorten(convert_json(response.content, _ErrorAnswer).error.message)
    except msgspec.MsgspecError:
        return _shorten(response.text)


def _shorten(text: str) -> str:
    return " ".join(text[:SHOWN_CHARACTERS_MAX].split()) or "no message"
