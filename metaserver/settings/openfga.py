"""The settings of OpenFGA, a part of the settings in `settings.py`."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class OpenFgaSettings:
    """The settings of OpenFGA."""

    openfga_url: str = setting(
        "",
        "URL of an OpenFGA server, such as http://127.0.0.1:8080. It decides about each operation that the grants "
        "allow. If it is empty, OpenFGA is not asked. It cannot be set together with opa_url.",
        schemes=("http", "https"),
    )
    openfga_store_id: str = setting("", "Id of the OpenFGA store with the relations of principals.")
    openfga_model_id: str = setting(
        "", "Id of the authorization model in the store. If it is empty, OpenFGA uses the newest model."
    )
    openfga_consistency: str = setting(
        "minimize_latency",
        "How new the relations are that OpenFGA reads: minimize_latency (its caches may answer), or "
        "higher_consistency (it reads its database).",
        choices=("minimize_latency", "higher_consistency"),
    )
    openfga_token_file: str = setting("", "File with the bearer token (a preshared key) for requests to OpenFGA.")
    openfga_ca_file: str = setting(
        "",
        "PEM file with the authorities that sign the certificate of OpenFGA. If it is empty, the server uses the "
        "authorities of the operating system.",
    )
    openfga_timeout_s: float = setting(
        2.0,
        "Seconds after which a request to OpenFGA fails. The client's request then gets 503.",
        minimum=0.01,
    )
    openfga_cache_s: float = setting(5.0, "Seconds for which the server remembers a decision of OpenFGA.", minimum=0)
    openfga_cache_entries: int = setting(
        100_000, "Maximum number of OpenFGA decisions that the server remembers.", minimum=1
    )
