"""What any package of the server uses at run time: the home folder, background work, concurrency, allowed staleness."""
