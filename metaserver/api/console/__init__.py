"""The web console: its page and static assets. Its data come by the other routes."""
