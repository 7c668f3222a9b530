"""The pages that need no Spark run from top to bottom; `test_spark_pages.py` has the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import Block, Page
from tests.docs.runner import EXECUTED_PAGES, SLOW_PAGES, list_pages_to_run, open_page_run, run_page


@pytest.mark.filterwarnings("ignore")  # Clients cause these warnings. In other tests, warnings of Seamark are errors.
@pytest.mark.parametrize("page", list_pages_to_run(with_spark=False), ids=str)
def test_page_runs_from_top_to_bottom(page: Page, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_page(page, tmp_path, request)


def test_slow_pages_are_pages_that_the_tests_execute() -> None:
    assert SLOW_PAGES - {str(page) for page in EXECUTED_PAGES} == set()


def test_failing_command_fails_its_page(tmp_path: Path) -> None:
    page = EXECUTED_PAGES[0]
    with open_page_run(page, tmp_path, {}, lambda: None) as run:
        run.run_block(Block("bash", "run", "seamark --version | grep seamark", 1))
        with pytest.raises(AssertionError, match=r"ended with 2\n(.*\n)*.*--nonsense"):
            run.run_block(Block("bash", "run", "seamark serve --nonsense", 1))
