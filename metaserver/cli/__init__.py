"""The command `seamark`: one file a group of commands; `main.py` puts them together."""
