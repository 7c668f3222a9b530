"""The pages that need no Spark run from top to bottom; `test_spark_pages.py` has the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import Block, Page
from tests.docs.runner import RUNNING, SLOW, page_run, run_page, running_pages


@pytest.mark.filterwarnings("ignore")  # clients' own; ours are errors in every other test
@pytest.mark.parametrize("page", running_pages(with_spark=False), ids=str)
def test_a_page_runs_from_top_to_bottom(page: Page, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_page(page, tmp_path, request)


def test_pages_that_are_slow_exist() -> None:
    assert SLOW - {str(page) for page in RUNNING} == set()


def test_a_command_that_fails_fails_its_page(tmp_path: Path) -> None:
    page = RUNNING[0]
    with page_run(page, tmp_path, {}, lambda: None) as run:
        run.block(Block("bash", "run", "seamark --version | grep seamark", 1))
        with pytest.raises(AssertionError, match=r"ended with 2\n(.*\n)*.*--nonsense"):
            run.block(Block("bash", "run", "seamark serve --nonsense", 1))
