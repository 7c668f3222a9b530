"""Tables read: the tasks of a plan, their rows, and what changed between snapshots."""
