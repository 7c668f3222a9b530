"""What is measured, and the demo: real data, real engines, each number beside a peer's in the same run.

`demo.py` is `make demo`; `run.py` is `make bench`, one script a question. Nothing in the packages imports this.
"""
