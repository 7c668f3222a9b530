"""Tables of all types have the rows of their models after random histories."""

from __future__ import annotations

from collections import Counter

import pytest

from seamark.connector.client.indexes import IndexClient
from tests.connector.histories.life import TableHistory
from tests.seeds import first_seed


def run_history(client: IndexClient, seed: int, steps: int, name: str) -> Counter[str]:
    history, operations = TableHistory(client, seed, name), list[str]()
    for _ in range(steps):
        try:
            operations.append(history.step())
            history.check()
        except Exception as error:
            error.add_note("\n".join([f"seed {seed}", *operations[-5:]]))
            raise
    return history.counts


def test_tables_of_all_types_have_the_rows_of_their_histories(client: IndexClient) -> None:
    counts = Counter[str]()
    for number in range(2):
        counts += run_history(client, 100 * first_seed() + number, 12, f"t{number}")
    assert counts["rows found"], counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(8))
def test_tables_of_all_types_have_the_rows_of_many_long_histories(client: IndexClient, number: int) -> None:
    for history_number in range(6):
        run_history(client, 10_000 * first_seed() + 100 * number + history_number, 40, f"t{history_number}")
