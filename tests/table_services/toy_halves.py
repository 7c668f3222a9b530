"""The two halves of the toy table service, and the worker process that includes it.

Importing this module registers the service. Settings and commands read the declarations when their modules are loaded,
so a program must register the declaration before it imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from seamark.commands import job_worker
from seamark.commands.serving.extensions import EXTENSIONS
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import change_table_properties
from seamark.connector.jobs.jobs import Table, table_job
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_count
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.services.services import SERVICES
from seamark.metaserver.services.job import Job
from seamark.metaserver.services.proposer import JobProposer, Problem, TableState
from seamark.metaserver.services.proposers import PROPOSERS
from seamark.metaserver.store.model import Entry
from tests.table_services.toy_service import LABEL, LABELLING_SERVICE, MIN_FILES

SERVICES[LABELLING_SERVICE.name] = LABELLING_SERVICE
object.__setattr__(EXTENSIONS, "job_worker", "tests.table_services.toy_halves")


def find_new_label(metadata: TableMetadata) -> str | None:
    """Return the number of data files, which is the label that the table must get, or None.

    None means that the label is right, or that the table has fewer data files than its property MIN_FILES.
    """
    snapshot = metadata.current_snapshot
    file_count = 0 if snapshot is None else parse_count(snapshot.build_summary_map(), "total-data-files", 0)
    is_wrong = file_count >= parse_count(metadata.properties, MIN_FILES, 2) and metadata.properties.get(LABEL) != str(
        file_count
    )
    return str(file_count) if is_wrong else None


class LabelProposer(JobProposer):
    service = LABELLING_SERVICE

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        return self.make_job(entry) if self.is_on(metadata) and find_new_label(metadata) else None

    def find_problems(self, state: TableState) -> Iterator[Problem]:
        if find_new_label(state.metadata):
            yield self.make_problem(state, "wrong label", "the label is not the number of files", "readers are misled")


PROPOSERS[LABELLING_SERVICE.name] = LabelProposer


@table_job(LABELLING_SERVICE)
def label_table(client: IndexClient, table: Table) -> dict[str, Any]:
    loaded_table = client.load_table(table)
    label = find_new_label(decode_table(loaded_table.metadata, loaded_table.location))
    if label is None:
        return {}
    change_table_properties(client, table, {LABEL: label}, ())
    return {"files": int(label)}


if __name__ == "__main__":
    job_worker.main()
