"""The core that server and clients share: Iceberg's formats, index kinds, and common parts of the protocol."""

if __name__ != "seamark.formats":
    raise ImportError("The package is named seamark.formats, not formats; import seamark.formats")
