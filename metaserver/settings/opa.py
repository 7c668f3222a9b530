"""The settings of Open Policy Agent, a part of the settings in `settings.py`."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class OpaSettings:
    """The settings of Open Policy Agent."""

    opa_url: str = setting(
        "",
        "URL of the Open Policy Agent rule that allows operations, such as "
        "http://127.0.0.1:8181/v1/data/seamark/allow. The rule decides about each operation that the grants allow. If "
        "it is empty, only the grants decide.",
        schemes=("http", "https"),
    )
    opa_batch_url: str = setting(
        "",
        "URL of the Open Policy Agent rule that returns the positions of the allowed objects in a listing. If it is "
        "empty, the server sends one request for each object to opa_url.",
        schemes=("http", "https"),
    )
    opa_token_file: str = setting("", "File with the bearer token for requests to Open Policy Agent.")
    opa_ca_file: str = setting(
        "",
        "PEM file with the authorities that sign the certificate of Open Policy Agent. If it is empty, the server "
        "uses the authorities of the operating system.",
    )
    opa_timeout_s: float = setting(
        2.0,
        "Seconds after which a request to Open Policy Agent fails. The client's request then gets 503.",
        minimum=0.01,
    )
    opa_cache_s: float = setting(
        5.0, "Seconds for which the server remembers a decision of Open Policy Agent.", minimum=0
    )
    opa_cache_entries: int = setting(
        100_000, "Maximum number of Open Policy Agent decisions that the server remembers.", minimum=1
    )
