"""Where jobs run: worker processes and Spark."""
