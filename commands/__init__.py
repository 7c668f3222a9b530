"""The command `seamark`: each module has a group of commands, and `main.py` assembles them.

Commands use the server and the connector, so this package is above both, and no other package imports it.
"""

if __name__ != "seamark.commands":
    raise ImportError("The package is named seamark.commands, not commands; import seamark.commands")
