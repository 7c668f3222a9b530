"""POST /v1/oauth/tokens: OAuth 2.0 for clients that are configured with a `credential`.

The Iceberg REST specification deprecates this route, but Spark, Trino, Flink, PyIceberg and DuckDB still use it. The
route supports two grants:

- Client credentials (RFC 6749, 4.4): `client_id` is the name of a bearer token of this server, and `client_secret` is
  the token itself, in the form or as HTTP Basic. Clients that are configured only with a secret send no id, which the
  server accepts.
- Token exchange (RFC 8693), with which Java clients refresh their tokens. Without credentials, the client gets an
  access token with the expiry of the old token. A client without the secret therefore cannot prolong a login, and a
  stolen access token expires. After the token has expired, Java sends Basic credentials. With the credentials of the
  same holder, the client gets an access token with a full lifetime, even if the old token has expired. A bearer token
  of this server is returned unchanged, because it is the secret. A token of the OIDC issuer is also returned unchanged,
  because only the issuer can prolong it.

The answer is a JWT (`access/issued.py`) that expires with the bearer token from which it was created. If the server has
no logins (auth = none), it accepts any credentials, because some clients require credentials. Errors have the form of
OAuth (RFC 6749, 5.2) instead of the catalog's form, because clients of this route expect it.
"""

from __future__ import annotations

import base64
import binascii
from urllib.parse import parse_qsl, unquote_plus

from aiohttp import web

from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.errors import BadRequest, TooLarge, Unauthenticated, UnsupportedMediaType
from seamark.metaserver.access.authenticator import Authenticator, Login
from seamark.metaserver.access.tokens import PREFIX
from seamark.metaserver.api.http import bodies
from seamark.metaserver.api.http.client_certificates import read_client_certificate
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec
from seamark.metaserver.api.http.dispatch import Route
from seamark.metaserver.api.http.keys import PRINCIPAL

_FIELDS_MAX = 32
_FORM = "application/x-www-form-urlencoded"
_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
_ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105  the name of a kind of token
_JWT = "urn:ietf:params:oauth:token-type:jwt"
_ID_TOKEN = "urn:ietf:params:oauth:token-type:id_token"  # noqa: S105

_TOKEN_SCHEMA = {
    "type": "object",
    "required": ["access_token", "token_type", "expires_in", "issued_token_type"],
    "properties": {
        "access_token": {"type": "string"},
        "token_type": {"const": "bearer"},
        "expires_in": {"type": "integer", "description": "Seconds."},
        "issued_token_type": {"type": "string"},
    },
}
_REFUSAL_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}, "error_description": {"type": "string"}},
}


class _Refusal(Exception):
    """Raised to send an OAuth error to the client. The status is 401 for invalid credentials, and otherwise 400."""

    def __init__(self, error: str, description: str) -> None:
        super().__init__(description)
        self.error = error
        self.description = description


@Route(
    method="POST",
    path="/v1/oauth/tokens",
    operation="getToken",
    summary="Return an access token for client credentials or an old token (OAuth 2.0 form; RFC 6749 and 8693)",
    tags=("access",),
    answers=(
        ResponseSpec(200, "The token", _TOKEN_SCHEMA),
        ResponseSpec(400, "The request or the token to exchange is invalid", _REFUSAL_SCHEMA),
        ResponseSpec(401, "The credentials are invalid", _REFUSAL_SCHEMA),
    ),
    body_size=BodySize.LOGIN,
    public=True,
).takes_request
async def get_token(request: web.Request) -> web.Response:
    """Issue an access token by the OAuth 2.0 protocol."""
    try:
        token, ttl_s = await _issue_access_token(request)
    except _Refusal as refusal:
        return _make_refusal_response(refusal)
    return _make_json_response(
        200,
        {"access_token": token, "token_type": "bearer", "expires_in": ttl_s, "issued_token_type": _ACCESS_TOKEN},
    )


async def _issue_access_token(request: web.Request) -> tuple[str, int]:
    """Issue an access token, and return it with its lifetime in seconds. Store the principal in the request.

    Raises:
        _Refusal: The request is incomplete or invalid.
    """
    form = await _read_form(request)
    client = _read_credentials(request, form)
    grant_type = form.get("grant_type")
    if grant_type not in ("client_credentials", _EXCHANGE):
        raise _Refusal("unsupported_grant_type", f"grant_type must be client_credentials or {_EXCHANGE}")
    if grant_type == _EXCHANGE:
        _check_exchange(form)
    components = request.app[COMPONENTS]
    authenticator, certificate = components.authenticator, read_client_certificate(components, request)
    authenticator.check_certificate(certificate)
    if authenticator.open:  # The server requires no login, so the token belongs to no principal.
        request[PRINCIPAL] = await authenticator.authenticate(request.headers, request.remote, certificate)
        return authenticator.issuer.issue(None)
    if grant_type == _EXCHANGE:
        return await _exchange_token(request, form["subject_token"], client)
    if client is None:
        raise _Refusal("invalid_client", "client_secret is missing; set it to a token from seamark token create")
    login = await _find_login(authenticator, *client)
    request[PRINCIPAL] = login.principal
    return authenticator.issuer.issue(login.token)


async def _read_form(request: web.Request) -> dict[str, str]:
    """Return the parameters of the form that have a value.

    Raises:
        _Refusal: The body is not a form, or has a parameter twice.
    """
    if request.content_type != _FORM:
        raise _Refusal("invalid_request", f"The body is not {_FORM}; send the parameters in this form")
    try:
        body = await bodies.read_body(request)
    except (BadRequest, TooLarge, UnsupportedMediaType) as error:
        raise _Refusal("invalid_request", error.message) from None
    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(body),
            max_num_fields=_FIELDS_MAX,
            errors="strict",
        )
    except ValueError:
        raise _Refusal("invalid_request", "The body is not a form with percent-encoded UTF-8") from None
    form = dict(pairs)
    if len(form) != len(pairs):
        raise _Refusal("invalid_request", "The form has a parameter twice; send each parameter once")
    return {name: value for name, value in form.items() if value}


def _read_credentials(request: web.Request, form: dict[str, str]) -> tuple[str | None, str] | None:
    """Return the client id, if there is one, and the secret, from the form or from HTTP Basic.

    If the form and HTTP Basic both have credentials, the credentials must be equal.

    Returns:
        None if there are no credentials.

    Raises:
        _Refusal: The credentials contradict each other, or the header is invalid.
    """
    credentials = (form.get("client_id"), form["client_secret"]) if "client_secret" in form else None
    scheme, _, encoded_credentials = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        # A bearer token in this header is the current token, which proves nothing that the form does not prove.
        return credentials
    try:
        name, _, secret = base64.b64decode(encoded_credentials.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise _Refusal("invalid_client", "The Authorization header is not Basic credentials in base64") from None
    # In HTTP Basic, both parts are also form-encoded (RFC 6749, 2.3.1).
    basic_credentials = (unquote_plus(name) or None, unquote_plus(secret))
    if not secret:  # Some clients send a secret without an id as the user name.
        basic_credentials = (None, unquote_plus(name))
    if credentials is not None and credentials != basic_credentials:
        raise _Refusal("invalid_request", "The form and the Authorization header have different credentials")
    return basic_credentials


async def _find_login(authenticator: Authenticator, name: str | None, secret: str) -> Login:
    """Return the login that belongs to a client secret. `name` is the client id, or None if the client sent none.

    Raises:
        _Refusal: The secret is invalid, or belongs to another client.
    """
    try:
        login = await authenticator.find_token_holder(secret)
    except Unauthenticated as error:
        raise _Refusal("invalid_client", error.message) from None
    if name is not None and name != login.principal.name:
        # Do not reveal to whom the secret belongs.
        raise _Refusal("invalid_client", "The client_secret does not belong to this client_id")
    return login


def _check_exchange(form: dict[str, str]) -> None:
    """Check the form of a token exchange.

    Raises:
        _Refusal: The subject token is missing, or a type of a token is not supported.
    """
    if "subject_token" not in form:
        raise _Refusal("invalid_request", "subject_token is missing")
    if form.get("subject_token_type") not in (_ACCESS_TOKEN, _JWT, _ID_TOKEN):
        raise _Refusal("invalid_request", f"subject_token_type must be {_ACCESS_TOKEN}, {_JWT} or {_ID_TOKEN}")
    if form.get("requested_token_type", _ACCESS_TOKEN) not in (_ACCESS_TOKEN, _JWT):
        raise _Refusal("invalid_request", f"requested_token_type must be {_ACCESS_TOKEN} or {_JWT}")


async def _exchange_token(
    request: web.Request, subject_token: str, client: tuple[str | None, str] | None
) -> tuple[str, int]:
    """Exchange a token for an access token, and return it with its lifetime in seconds.

    An access token of this server is replaced by a new token. The new token expires no later than the old token, unless
    the request also has the credentials of the client. All other tokens are returned unchanged.
    """
    authenticator = request.app[COMPONENTS].authenticator
    holder_login = await _find_login(authenticator, *client) if client is not None else None
    login = await _log_in_subject(authenticator, subject_token, holder_login)
    request[PRINCIPAL] = login.principal
    if login.token is not None and not subject_token.startswith(PREFIX):
        return authenticator.issuer.issue(login.token, None if holder_login is not None else login.expires_ms)
    # Return a bearer token of this server, or a token of the OIDC issuer, unchanged.
    ttl_s = authenticator.issuer.ttl_s
    if login.expires_ms is not None:
        remaining_s = (login.expires_ms - request.app[COMPONENTS].clock.now_ms()) // 1000
        ttl_s = remaining_s if login.token is None else min(ttl_s, remaining_s)
    return subject_token, max(1, ttl_s)


async def _log_in_subject(authenticator: Authenticator, subject_token: str, holder_login: Login | None) -> Login:
    """Return the login of the token to exchange.

    `holder_login` is the login of the credentials in the request. It is None if the request has no credentials. If the
    credentials belong to the holder of the token, an expired token is also accepted.

    Raises:
        _Refusal: The token is invalid, or belongs to a different client.
    """
    try:
        if holder_login is None:
            return await authenticator.find_login(subject_token)
        try:
            login = await authenticator.find_login(subject_token)
        except Unauthenticated:
            login = await authenticator.find_expired_login(subject_token)
    except Unauthenticated as error:
        raise _Refusal("invalid_grant", error.message) from None
    if login.token is not None and holder_login.token is not None and login.token.id != holder_login.token.id:
        raise _Refusal("invalid_grant", "The subject_token belongs to a client other than that of the credentials")
    return login


def _make_refusal_response(refusal: _Refusal) -> web.Response:
    """Return the response to a refused request, in the form of OAuth 2.0."""
    response = _make_json_response(
        401 if refusal.error == "invalid_client" else 400,
        {"error": refusal.error, "error_description": refusal.description},
    )
    if response.status == 401:
        response.headers["WWW-Authenticate"] = 'Basic realm="seamark"'
    return response


def _make_json_response(status: int, value: object) -> web.Response:
    headers = {"Cache-Control": "no-store", "Pragma": "no-cache"}
    return web.Response(status=status, body=encode_json(value), content_type="application/json", headers=headers)
