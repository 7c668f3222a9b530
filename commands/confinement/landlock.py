"""Landlock: the Linux kernel restricts the files that this process opens, and the programs that it starts.

`confine` and DuckDB's settings forbid the same accesses, but Landlock also works if a library has a
fault. A kernel without Landlock (before 5.13, or switched off) restricts nothing. The only package for
Landlock on PyPI is a pre-release, so this module makes the three system calls itself. The calls restrict
the calling thread and the threads that it starts later, so they must run before DuckDB and Arrow start their
threads. See linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress

import seamark

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""The numbers of the three system calls, the same on all architectures."""
_ABI, _PATH_BENEATH = 1, 1
"""The flag with which the kernel returns its ABI version, and the type of a rule for a file or folder."""
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_CHANGES = sum(1 << bit for bit in range(4, 13)) | _EXECUTE | _WRITE_FILE
"""The accesses of ABI 1 that create or remove files of any kind."""
_REFER, _TRUNCATE = 1 << 13, 1 << 14
"""The accesses that exist since ABI 2 and since ABI 3."""
_NET_PORT, _BIND_TCP, _CONNECT_TCP = 2, 1 << 0, 1 << 1
"""Rights for TCP ports, which exist since version 4 of Landlock's ABI."""
_SCOPED = 1 << 0 | 1 << 1
"""The scopes since ABI 6: abstract sockets, and signals to other processes."""
_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
"""The accesses that a rule for a file may have."""
_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/opt", "/dev/urandom", "/dev/null", "/proc/self", "/proc/meminfo", "/proc/cpuinfo"),
    *("/sys/devices/system/cpu", "/sys/fs/cgroup", "/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/resolv.conf"),
    *("/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services", "/etc/localtime"),
    *("/etc/ld.so.cache", "/etc/mime.types", "/run/systemd/resolve"),
)
"""The paths of libraries, name resolution, certificates and time zones."""


def forbid_changes() -> bool:
    """Prevent this process from writing, creating and removing files, and from starting programs.

    Returns:
        False if the kernel has no Landlock.
    """
    abi = _read_abi_version()
    handled_rights = _CHANGES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    return abi > 0 and _restrict_process(handled_rights, {})


def forbid_reads_except(folders: Iterable[str]) -> bool:
    """Prevent the process from reading files outside some folders, except the files that Python and the system need.

    Returns:
        False if the kernel has no Landlock.
    """
    if _read_abi_version() < 1:
        return False
    reads = _READ_FILE | _READ_DIR
    return _restrict_process(reads, dict.fromkeys([*folders, *_list_system_paths()], reads))


def confine_files(
    *, readable: Iterable[str], writable: Iterable[str], connectable: Iterable[int] | None = None
) -> bool:
    """Restrict the files that the process can read and write from now on.

    It can read only files below `readable`, and files that Python and the system need. It can write, create and remove
    only files below `writable`. It cannot start programs. The restriction of ports needs Linux 6.7. Since Linux 6.12,
    the process also cannot send signals to other processes.

    Args:
        readable: The folders whose files the process can read.
        writable: The folders whose files the process can also write, create and remove.
        connectable: The TCP ports to which the process can connect. The process then cannot listen on any port. If
            this is None, ports are not restricted.

    Returns:
        False if the kernel has no Landlock.
    """
    abi = _read_abi_version()
    if abi < 1:
        return False
    reads = _READ_FILE | _READ_DIR
    handled_rights = _CHANGES | reads | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    rights = dict.fromkeys([*readable, *_list_system_paths()], reads)
    rights["/dev/null"] = reads | _WRITE_FILE
    rights |= dict.fromkeys(writable, handled_rights & ~_EXECUTE)
    ports = None if abi < 4 or connectable is None else frozenset(connectable)
    return _restrict_process(handled_rights, rights, ports=ports, scopes=_SCOPED if abi >= 6 else 0)


def _list_system_paths() -> list[str]:
    """Return the paths that Python and the system read."""
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SEAMARK_CA", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    variables = (os.environ.get(name) for name in names)
    python = (sys.prefix, sys.base_prefix, *(path for path in sys.path if os.path.isabs(path)))
    # In a checkout, the packages below `seamark` are symbolic links.
    packages = [os.path.realpath(entry) for path in seamark.__path__ for entry in os.scandir(path)]
    return [*python, *packages, *filter(None, variables), *_SYSTEM]


def _read_abi_version() -> int:
    """Return the version of Landlock, or 0 or less if the kernel has no Landlock."""
    if sys.platform != "linux":
        return 0
    return int(_call_kernel(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ABI)))


def _restrict_process(
    handled_rights: int, rights: Mapping[str, int], *, ports: frozenset[int] | None = None, scopes: int = 0
) -> bool:
    """Restrict this process, and return True. Files that do not exist or cannot be opened get no rule.

    Args:
        handled_rights: The accesses that are restricted.
        rights: The accesses that remain allowed, by file or folder.
        ports: The TCP ports to which the process can connect, or None for all ports.
        scopes: What is also forbidden outside of this process, as bits: signals, and connections to abstract sockets.

    Raises:
        OSError: The kernel refuses a rule.
    """
    attributes = struct.pack("=Q", handled_rights)
    if ports is not None or scopes:
        attributes += struct.pack("=Q", 0 if ports is None else _BIND_TCP | _CONNECT_TCP)
        attributes += struct.pack("=Q", scopes) if scopes else b""
    ruleset = _call_kernel(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock: the kernel did not create the ruleset")
    try:
        for path, access in rights.items():
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _allow_path(ruleset, access & handled_rights, path)
        for port in ports or ():
            _add_rule(ruleset, _NET_PORT, struct.pack("=QQ", _CONNECT_TCP, port), f"port {port}")
        if _call_kernel(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)) != 0:
            raise OSError(ctypes.get_errno(), "Landlock: the kernel refused the ruleset")
    finally:
        os.close(ruleset)
    return True


def _allow_path(ruleset: int, access: int, path: str) -> None:
    """Allow access to a path in a set of Landlock rules.

    Args:
        ruleset: The file descriptor of the set of rules.
        access: The allowed operations, as bits. Operations on folders are left out for a file, because Landlock refuses
            a rule that allows them.
        path: The file or folder.
    """
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        possible_access = access if os.path.isdir(path) else access & _FILE
        _add_rule(ruleset, _PATH_BENEATH, struct.pack("=Qi", possible_access, descriptor), path)
    finally:
        os.close(descriptor)


def _add_rule(ruleset: int, kind: int, rule: bytes, subject: str) -> None:
    if _call_kernel(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(kind), rule, ctypes.c_uint32(0)) != 0:
        raise OSError(ctypes.get_errno(), f"Landlock: the kernel refused the rule for {subject}")


def _call_kernel(number: int, *arguments: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return int(library.syscall(ctypes.c_long(number), *arguments))
