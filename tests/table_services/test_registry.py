"""Tests that each declared table service has both halves and a command, and keeps its stored names."""

from __future__ import annotations

import pytest

from seamark.commands.maintenance.run import run
from seamark.connector.jobs.jobs import JOBS
from seamark.formats.protocol.wire import ACCESS_CHECK
from seamark.formats.services.service import TableService
from seamark.formats.services.services import SERVICES, list_affecting_prefixes, list_inherited_prefixes
from seamark.metaserver.services.policy import PROPERTIES
from seamark.metaserver.services.proposers import PROPOSERS
from seamark.metaserver.settings.settings import FIELDS

STORED_NAMES = {
    "indexing": ("index", None, None),
    "compaction": ("compact", "seamark.compaction.enabled", "services_compaction"),
    "clustering": ("cluster", "seamark.clustering.enabled", "services_clustering"),
    "column-ttl": ("column-ttl", "seamark.column-ttl.enabled", "services_column_ttl"),
    "expiration": ("expire", "seamark.expiration.enabled", "services_expiration"),
    "orphan-files": ("orphan-files", "seamark.orphan-files.enabled", "services_orphan_files"),
    "statistics": ("statistics", "seamark.statistics.enabled", "services_statistics"),
    "manifests": ("manifests", "seamark.manifests.enabled", "services_manifests"),
    "bucket-splitting": ("split-buckets", "seamark.bucket-splitting.enabled", "services_bucket_splitting"),
    "auto-advice": ("auto-advice", "seamark.auto-advice.enabled", "services_auto_advice"),
}
"""(command, switch, setting) of each service. They must not change, because tables, settings and scripts
contain them.
"""


def test_each_service_has_both_halves_and_a_command() -> None:
    assert PROPOSERS.keys() == SERVICES.keys()
    assert JOBS.keys() - {ACCESS_CHECK} == SERVICES.keys()
    assert {service.command for service in SERVICES.values()} <= run.commands.keys()
    assert all(proposer.service is SERVICES[name] for name, proposer in PROPOSERS.items())


def test_names_stored_in_tables_and_settings_do_not_change() -> None:
    assert {
        name: (service.command, service.switch, service.setting) for name, service in SERVICES.items()
    } == STORED_NAMES


@pytest.mark.parametrize("service", SERVICES.values(), ids=list(SERVICES))
def test_properties_and_settings_of_a_service_follow_its_declaration(service: TableService) -> None:
    assert service.setting is None or service.setting in FIELDS
    assert service.setting is None or service.setting_help
    for declared_property in service.list_policy_properties():
        assert declared_property.name.startswith(service.property_prefixes)
        assert declared_property.name in PROPERTIES
    assert set(service.affected_by) <= SERVICES.keys() - {service.name}


def test_each_service_lists_the_properties_that_steer_its_jobs() -> None:
    assert list_affecting_prefixes("compaction") == ("seamark.compaction.", "seamark.clustering.")
    assert list_affecting_prefixes("expiration") == ("seamark.expiration.", "history.expire.")
    assert list_affecting_prefixes("indexing") == ("seamark.index.",)
    assert "seamark.index." not in list_inherited_prefixes()
    assert "history.expire." in list_inherited_prefixes()
