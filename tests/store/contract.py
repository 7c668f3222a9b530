"""The contract of every pointer store. The test class of each database inherits it and adds the `url` fixture."""

from __future__ import annotations

from tests.store.contract_claims import ClaimsContract
from tests.store.contract_index_files import IndexFilesContract
from tests.store.contract_names import NamesContract
from tests.store.contract_plan_tables import PlanTablesContract
from tests.store.contract_producers import ProducersContract, StreamsContract
from tests.store.contract_recorded_reads import ColumnReadsContract, QueryHistoryContract
from tests.store.contract_records import RecordsContract
from tests.store.contract_replicas import ReplicasContract
from tests.store.contract_timeline import TimelineContract
from tests.store.contract_transactions import TransactionsContract
from tests.store.contract_warehouses import WarehousesContract


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
    """All parts of the contract."""
