"""Plugins that `tests/conftest.py` loads: they sort tests into tiers, spread them over processes, and measure them."""
