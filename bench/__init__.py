"""The benchmarks and the demo. They use real data and real engines, and each run also measures a peer.

`demo.py` is `make demo`. `run.py` is `make bench`, with one script for each question. The packages import
nothing from this folder.
"""
