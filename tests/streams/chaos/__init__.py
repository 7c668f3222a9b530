"""Campaigns against servers as processes, which are killed, paused, cut off and left without disk space under load."""
