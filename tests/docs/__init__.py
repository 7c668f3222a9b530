"""What the documentation says is run, compared and followed."""
