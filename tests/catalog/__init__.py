"""The catalog over a real SQLite store and real files, and with faults that reality will not produce on demand."""
