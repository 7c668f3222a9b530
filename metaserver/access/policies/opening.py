"""Opens the authorizer that the settings choose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.access.authorizer import Authorizer
from seamark.metaserver.access.policies.opa import OpaClient
from seamark.metaserver.access.policies.openfga import OpenFgaClient
from seamark.metaserver.access.policies.policy import PolicyAuthorizer, open_session
from seamark.metaserver.settings.settings import Settings


@asynccontextmanager
async def open_authorizer(
    settings: Settings, clock: Clock, grants: Authorizer, warehouse_name: str
) -> AsyncIterator[Authorizer]:
    """Open the configured authorizer: the grants alone, or the grants and a policy server.

    Raises:
        ConfigError: The certificate authorities in `opa_ca_file` or `openfga_ca_file` cannot be read.
    """
    if settings.opa_url:
        async with open_session(settings.opa_timeout_s, settings.opa_ca_file, "opa_ca_file") as http:
            yield PolicyAuthorizer(grants, OpaClient(settings, clock, http, warehouse_name))
    elif settings.openfga_url:
        async with open_session(settings.openfga_timeout_s, settings.openfga_ca_file, "openfga_ca_file") as http:
            yield PolicyAuthorizer(grants, OpenFgaClient(settings, clock, http, warehouse_name))
    else:
        yield grants
