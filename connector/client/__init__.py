"""The client of the server: requests, their answers and errors, and the storage that tables name."""
