"""Groups of cubes, merged over the data files of a snapshot, and aggregates of these groups."""
