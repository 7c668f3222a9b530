"""Native commits, the timeline, and dropped tables."""
