"""What one client can do to the others of a server: attacks on its resources, beside a good client that is timed."""
