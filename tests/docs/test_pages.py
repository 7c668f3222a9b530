"""The pages that need no Spark run from top to bottom; `test_spark_pages.py` has the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import Page
from tests.docs.runner import RUNNING, asks_for_spark, run_page


@pytest.mark.filterwarnings("ignore")  # clients' own; ours are errors in every other test
@pytest.mark.parametrize("page", [page for page in RUNNING if not asks_for_spark(page)], ids=str)
def test_a_page_runs_from_top_to_bottom(page: Page, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_page(page, tmp_path, request)
