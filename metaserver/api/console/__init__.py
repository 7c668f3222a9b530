"""The web console: its page and static assets. The page gets its data from the other routes."""
