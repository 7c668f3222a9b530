"""How the files of tests are spread over the processes of pytest-xdist (`pytest -n 2`).

A file stays whole, since its fixtures are started once for all of it. What asks for Spark or Trino runs in one process:
a second one costs more to start and to warm up than it saves. What takes longest begins first, so that no process
is left alone with it at the end. Without `-n` nothing of this has any effect.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

SPARK = ("tests/engines/", "tests/deploy/", "tests/docs/test_docs.py")
"""Of which `tests/deploy/` has all that asks for Trino."""
LONG = ("tests/bench/test_demo.py",)
"""Files of about a minute and more."""


class Spread(LoadFileScheduling):
    """Whole files, and those of Spark and Trino as if they were one."""

    def _split_scope(self, nodeid: str) -> str:
        return "Spark" if nodeid.startswith(SPARK) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spread:
    config.option.loadscopereorder = False  # files come in the order of `pytest_collection_modifyitems`
    return Spread(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In every process alike: first Spark, then what is long, then the rest as collected."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (not item.nodeid.startswith(SPARK), not item.nodeid.startswith(LONG)))
