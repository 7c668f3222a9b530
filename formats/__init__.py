"""The core that server and clients share.

It has Iceberg's formats, index kinds, and the parts of the protocol that both need.
"""

if __name__ != "seamark.formats":
    raise ImportError("Import seamark.formats: formats is its folder in the repository")
