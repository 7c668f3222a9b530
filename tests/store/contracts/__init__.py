"""The parts of the contract of pointer stores."""
