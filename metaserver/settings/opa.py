"""The settings of Open Policy Agent. They are a part of `settings.py`."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class OpaSettings:
    opa_url: str = setting(
        "",
        "URL of the rule of Open Policy Agent that allows operations, such as "
        "http://127.0.0.1:8181/v1/data/seamark/allow. It decides about each operation that the grants allow. Empty: "
        "only the grants decide.",
        schemes=("http", "https"),
    )
    opa_batch_url: str = setting(
        "",
        "URL of the rule that returns the positions of the allowed objects of a listing. If it is empty, the server "
        "sends a request to opa_url for each object.",
        schemes=("http", "https"),
    )
    opa_token_file: str = setting("", "File with the bearer token for requests to Open Policy Agent.")
    opa_ca_file: str = setting(
        "",
        "Authorities (PEM) that sign the certificate of Open Policy Agent. If it is empty, the server uses the "
        "authorities of the system.",
    )
    opa_timeout_s: float = setting(
        2.0, "Seconds after which a request to Open Policy Agent fails. The client then gets 503.", minimum=0.01
    )
    opa_cache_s: float = setting(
        5.0, "Seconds for which a decision of Open Policy Agent counts without another request.", minimum=0
    )
    opa_cache_entries: int = setting(100_000, "Maximum number of remembered decisions.", minimum=1)
