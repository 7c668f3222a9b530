"""The client of the server: requests, responses and errors, and access to the storage of tables."""
