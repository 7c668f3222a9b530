"""The client of the server: requests, their answers and errors, and access to the storage of tables."""
