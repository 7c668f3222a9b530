"""That the benchmark's data are what the benchmark says, and that its reports say what was measured."""
