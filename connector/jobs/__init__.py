"""Jobs that maintain one table. The server's table services and `seamark run` run them."""
