"""The command `seamark`: one module a group of commands; `main.py` assembles them."""
