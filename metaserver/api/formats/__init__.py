"""Wire formats: listings as Arrow and JSON, and streamed answers."""
