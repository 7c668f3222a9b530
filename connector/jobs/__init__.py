"""Jobs that maintain one table; the server's table services and `seamark run` run them."""
