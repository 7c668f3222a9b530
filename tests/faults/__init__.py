"""Real processes: servers that are killed at each step of a commit, clients that race, and a checker of the history."""
