"""Commands that maintain tables: `seamark run`, `seamark services`, `seamark health`."""
