"""The pages that run statements in Spark. They have their own file, because only they wait for the session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import Page
from tests.docs.runner import list_pages_to_run, run_page


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")  # Clients cause these warnings. In other tests, warnings of Seamark are errors.
@pytest.mark.parametrize("page", list_pages_to_run(with_spark=True), ids=str)
def test_page_with_spark_runs_from_top_to_bottom(page: Page, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_page(page, tmp_path, request)
