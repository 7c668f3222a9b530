"""The settings of logins by client certificates."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class ClientCertificateSettings:
    """The settings of logins by client certificates."""

    tls_client_ca: str = setting(
        "",
        "PEM file with the certificate authorities (CAs) of clients. If it is set, the server requests a certificate "
        "from each client, and refuses a connection with a certificate of any other CA. It reloads the file together "
        "with tls_cert.",
    )
    tls_client_crl: str = setting(
        "",
        "PEM file with the revocation lists (CRLs) of the authorities in tls_client_ca, one list for each authority. "
        "The server refuses clients with a revoked certificate. It also refuses all clients of an authority whose "
        "list is missing or is past its next update. It reloads the file together with tls_cert.",
    )
    tls_client_auth: str = setting(
        "optional",
        "Whether each request needs a client certificate: optional or required. With required, a request with a token "
        "needs a certificate too. Probes and the server's own processes never need one.",
        choices=("optional", "required"),
    )
    tls_client_name: str = setting(
        "uri",
        "The name in a client certificate that becomes the principal cert:<name>: uri (such as a SPIFFE id), dns, "
        "email, or cn (the common name). A certificate with several names of this kind has no principal.",
        choices=("uri", "dns", "email", "cn"),
    )
    tls_client_rules_file: str = setting(
        "",
        "TOML file with rules that map the names in client certificates to principals, groups and roles. Each rule is "
        "a table [[rule]]. The rules replace tls_client_name. The server reads the file when it starts.",
    )
