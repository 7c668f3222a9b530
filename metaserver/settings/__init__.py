"""The settings of a server, and the sources of their values."""
