"""Object storage: one port, local files and S3 behind it, and what clients are told about reaching it themselves."""
