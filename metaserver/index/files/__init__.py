"""Index files of the server: reading, registration, opening and cleaning."""
