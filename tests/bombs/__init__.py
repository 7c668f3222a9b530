"""Files and requests that are small and would take much memory: each is refused, or answered, within a bound."""
