"""The contract of every pointer store. The test class of each database inherits it, and adds the fixture `url`."""

from __future__ import annotations

from tests.store.contracts.claims import ClaimsContract
from tests.store.contracts.index_files import IndexFilesContract
from tests.store.contracts.names import NamesContract
from tests.store.contracts.plan_tables import PlanTablesContract
from tests.store.contracts.producers import ProducersContract, StreamsContract
from tests.store.contracts.recorded_reads import ColumnReadsContract, QueryHistoryContract
from tests.store.contracts.records import RecordsContract
from tests.store.contracts.replicas import ReplicasContract
from tests.store.contracts.timeline import TimelineContract
from tests.store.contracts.transactions import TransactionsContract
from tests.store.contracts.warehouses import WarehousesContract


class PointerStoreContract(
    NamesContract,
    TransactionsContract,
    TimelineContract,
    RecordsContract,
    IndexFilesContract,
    ProducersContract,
    PlanTablesContract,
    ClaimsContract,
    ReplicasContract,
    ColumnReadsContract,
    QueryHistoryContract,
    StreamsContract,
    WarehousesContract,
):
    """All parts of the contract of pointer stores."""
