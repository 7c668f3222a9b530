"""How tests are sorted into tiers, spread over processes, and timed: plugins that `tests/conftest.py` loads."""
