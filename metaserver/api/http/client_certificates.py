"""Reader of the client certificate of a request."""

from __future__ import annotations

import ssl

from aiohttp import web

from seamark.formats.runtime.tls import ClientCertificate
from seamark.metaserver.api.http.components import ServerComponents


def read_client_certificate(components: ServerComponents, request: web.Request) -> ClientCertificate | None:
    """Return the verified client certificate of a request.

    Returns:
        None if the client presented no certificate, or if the server does not ask for certificates.

    Raises:
        Unauthenticated: The certificate was revoked, its authority is no longer trusted, or the server has no current
            revocation list of the authority.
    """
    if not components.settings.tls_client_ca or components.certificate is None or request.transport is None:
        return None
    connection = request.transport.get_extra_info("ssl_object")
    if not isinstance(connection, ssl.SSLObject):
        return None
    return components.certificate.read_client_certificate(connection, components.clock.now_ms())
