"""Jobs that maintain one table: what the server's table services run, and `seamark run`."""
