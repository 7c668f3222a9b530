"""Files of this machine, whose folders other accounts may write to."""
