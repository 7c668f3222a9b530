"""Views over blocks: what they share, and what becomes of damage."""
