"""Settings of logins by client certificates."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class ClientCertificateSettings:
    tls_client_ca: str = setting(
        "",
        "Authorities that sign certificates of clients (PEM). The server then asks each client for a certificate, and "
        "refuses a connection with a certificate of another authority. It reloads the file with tls_cert.",
    )
    tls_client_crl: str = setting(
        "",
        "Revocation lists (CRLs, PEM) of the authorities in tls_client_ca, one list of each authority. The server "
        "refuses clients with a revoked certificate, and all clients of an authority without a list or with a list "
        "that is past its next update. It reloads the file with tls_cert.",
    )
    tls_client_auth: str = setting(
        "optional",
        "Whether a request needs a client certificate: optional, or required, also beside a token. Probes and the "
        "server's own processes need none.",
        choices=("optional", "required"),
    )
    tls_client_name: str = setting(
        "uri",
        "The name in a client certificate that names the principal cert:<name>: uri (such as a SPIFFE id), dns, email, "
        "or cn (the common name). A certificate with several such names has no principal.",
        choices=("uri", "dns", "email", "cn"),
    )
    tls_client_rules_file: str = setting(
        "",
        "TOML file with rules that map names in client certificates to principals, groups and roles, each a table "
        "[[rule]]. It replaces tls_client_name, and is read at the start.",
    )
