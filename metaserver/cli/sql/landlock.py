"""Landlock: the Linux kernel restricts which files this process opens, and what it starts later.

`confine` and DuckDB's settings forbid the same; this also holds if a library has a fault. A kernel without Landlock
(before 5.13, or switched off) restricts nothing. The only package for it on PyPI is a pre-release, so the three system
calls are made here. They restrict the calling thread and the threads that it starts later, so they come before DuckDB
and Arrow start theirs. See linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""The same numbers on all architectures."""
_ABI, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_CHANGES = sum(1 << bit for bit in range(4, 13)) | _EXECUTE | _WRITE_FILE
"""Of ABI 1: removes and makes files of all kinds."""
_REFER, _TRUNCATE = 1 << 13, 1 << 14
"""Since ABI 2 and ABI 3."""
_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/opt", "/dev/urandom", "/dev/null", "/proc/self", "/proc/meminfo", "/proc/cpuinfo"),
    *("/sys/devices/system/cpu", "/sys/fs/cgroup", "/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/resolv.conf"),
    *("/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services", "/etc/localtime"),
    *("/etc/ld.so.cache", "/etc/mime.types", "/run/systemd/resolve"),
)
"""Libraries, names of hosts, certificates and time zones."""


_PACKAGES = ("seamark.connector", "seamark.metaserver")
"""They are links in a checkout."""


def forbid_changes() -> bool:
    """Nothing is written, made, removed or started from now on. False if the kernel has no Landlock."""
    abi = _abi()
    handled = _CHANGES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    return abi > 0 and _restrict(handled, ())


def forbid_reads_except(folders: Iterable[str]) -> bool:
    """Of files only those below these folders are opened from now on, and those that Python and the system need. False
    if the kernel has no Landlock."""
    if _abi() < 1:
        return False
    variables = (os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "SEAMARK_CA"))
    python = (sys.prefix, sys.base_prefix, *(path for path in sys.path if os.path.isabs(path)))
    packages = [os.path.realpath(path) for name in _PACKAGES for path in sys.modules[name].__path__]
    return _restrict(_READ_FILE | _READ_DIR, [*folders, *python, *packages, *filter(None, variables), *_SYSTEM])


def _abi() -> int:
    """The version of Landlock; 0 or less if there is none."""
    if sys.platform != "linux":
        return 0
    return int(_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ABI)))


def _restrict(handled: int, allowed: Iterable[str]) -> bool:
    """`allowed`: files and folders below which these accesses stay. OSError if the kernel refuses a rule."""
    ruleset = _call(_CREATE_RULESET, struct.pack("=Q", handled), ctypes.c_size_t(8), ctypes.c_uint32(0))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock: no ruleset")
    try:
        for path in dict.fromkeys(allowed):
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _allow(ruleset, handled, path)
        if _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)) != 0:
            raise OSError(ctypes.get_errno(), "Landlock: the ruleset is refused")
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, handled: int, path: str) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        access = handled if os.path.isdir(path) else handled & ~_READ_DIR
        rule = struct.pack("=Qi", access, descriptor)
        if _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0)) != 0:
            raise OSError(ctypes.get_errno(), f"Landlock: no rule for {path}")
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return int(library.syscall(ctypes.c_long(number), *arguments))
