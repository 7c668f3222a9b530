"""`seamark demo`, which shows the benefits of the server to an unmodified reader."""
