"""Who set each property of a policy, so that a job has no more rights than that principal has now.

The server keeps the names in one property of the table or namespace, which no client can set: each change is computed
from the stored value. Without logins there are no names.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from seamark.formats.services.services import SERVICES
from seamark.metaserver.access.principal import ANONYMOUS_NAME
from seamark.metaserver.access.worker_tokens import SERVICE_PRINCIPAL
from seamark.metaserver.catalog.policies import PREFIXES, SETTERS, setters_of
from seamark.metaserver.catalog.values import Caller

_RECORDED = (
    *PREFIXES,
    *(prefix for service in SERVICES.values() for prefix in service.property_prefixes if not service.is_inherited),
)


def with_setters(caller: Caller, properties: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """The properties with the names of their setters: the caller for each value that differs from `before`. Names that
    a client gives are ignored."""
    known = setters_of(before)
    setters = {}
    for name, value in properties.items():
        if not name.startswith(_RECORDED):
            continue
        if value != before.get(name) and caller.who != SERVICE_PRINCIPAL:
            if caller.who != ANONYMOUS_NAME:
                setters[name] = caller.who
        elif name in known:
            setters[name] = known[name]
    kept = {name: value for name, value in properties.items() if name != SETTERS}
    return {**kept, SETTERS: msgspec.json.encode(setters, order="sorted").decode()} if setters else kept
