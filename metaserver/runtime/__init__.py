"""The run time of the server for all packages: the home folder, background work, concurrency, allowed staleness."""
