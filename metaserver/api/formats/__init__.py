"""Wire formats: Arrow and JSON listings, answers sent in pieces."""
