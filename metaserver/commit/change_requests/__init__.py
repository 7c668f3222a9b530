"""Changes as writers send them, and their refusal."""
