"""`seamark demo`, which shows what the server does for an unmodified reader."""
