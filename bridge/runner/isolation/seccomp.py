"""A filter of kernel calls for a job: what no program of a job needs is answered with EPERM.

Closed are ways to change mounts, namespaces, modules, the clock or the machine; to look into or signal other
programs; keys; kernel interfaces with a long list of faults (io_uring, bpf, perf, userfaultfd); memory that
belongs to no process and so escapes the watchdog; and sockets of every kind but internet and local ones.
Where no namespace does it, internet and local sockets are closed, too. The filter holds for everything the
job starts, and cannot be taken off.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.runner.isolation import libc

# name: number on x86-64, number on 64-bit ARM (None: it is not there).
DENIED: dict[str, tuple[int, int | None]] = {
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    # other programs
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "acct": (163, 89),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    # keys
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # interfaces that see far
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # memory of no process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}

_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _IOCTL, _FCNTL, _PRLIMIT, _PIDFD_SEND_SIGNAL = (
    *((56, 220), (435, 435), (41, 198), (53, 199)),
    *((16, 29), (72, 25), (302, 261), (424, 424)),
)
# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_open: the first argument is a process.
_SIGNALS = ((62, 129), (200, 130), (234, 131), (129, 138), (297, 240), (434, 434))
# sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr: likewise.
_SCHEDULING = ((142, 118), (144, 119), (203, 122), (314, 274))
# setpriority, ioprio_set: the second argument is a process, a group or a user; the first says which.
_PRIORITIES, _OF_A_USER = ((141, 140), (251, 30)), (2, 3)
_NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
_UNIX, _INET, _INET6 = 1, 2, 10
_DATAGRAMS = 2  # a bit of the kinds of sockets that reach others without being connected to them
_TYPED_FOR_OTHERS = (0x5412, 0x541C)  # ioctl TIOCSTI and TIOCLINUX: characters into a terminal
# fcntl F_SETOWN and F_SETOWN_EX, ioctl FIOSETOWN and SIOCSPGRP: whom a signal of choice goes to.
_OWNED, _OWNED_BY_IOCTL = (8, 15), (0x8901, 0x8902)

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_SET_MODE_FILTER = {"x86_64": 317, "aarch64": 277}


@dataclass(frozen=True)
class Closed:
    """What of the network and of other processes the filter closes, because nothing else here does.

    Attributes:
        internet: Sockets of the internet families.
        local: Sockets with a name on this machine; connected pairs of a job's own stay.
        signals: Process ids that get no signal and keep their share of the processor, and the groups they
            lead; what goes to every process of the user, or goes by descriptor, is then closed, too.
    """

    internet: bool = False
    local: bool = False
    signals: Sequence[int] = ()


def available() -> bool:
    """Whether there is a filter for this machine."""
    if not libc.LINUX or os.uname().machine not in _ARCHITECTURES:
        return False
    try:
        # The kernel reads the program only after it looked at the flags.
        libc.syscall(_SET_MODE_FILTER[os.uname().machine], 1, 0, None)
    except OSError as error:
        return error.errno == errno.EFAULT
    return False


def program(machine: str, closed: Closed) -> bytes:
    """The filter as a program of the kernel's classic packet filter, 8 bytes an instruction.

    Args:
        machine: As ``uname -m`` says.
        closed: What it closes beside `DENIED`.
    """
    architecture, column = _ARCHITECTURES[machine]
    denied = _RETURN, 0, 0, 0x50000 | errno.EPERM
    lines = [
        *((_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)),
        *((_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), denied),
    ]
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            lines += [(_EQUAL, 0, 1, number), denied]
    # A missing clone3 has every C library fall back to clone, whose flags can be looked at.
    lines += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, 0x50000 | errno.ENOSYS)]
    families = [] if closed.internet else [_INET, _INET6]
    lines += _only(_SOCKET[column], 0, families if closed.local else [_UNIX, *families])
    lines += _only(_SOCKETPAIR[column], 0, [_UNIX])
    if closed.local:
        lines += _never(_SOCKETPAIR[column], 1, [(_ANY_BIT, _DATAGRAMS)])
    lines += _only(_PRLIMIT[column], 0, [0])
    lines += _never(_CLONE[column], 0, [(_ANY_BIT, _NAMESPACES)])
    lines += _never(_IOCTL[column], 1, [(_EQUAL, request) for request in _TYPED_FOR_OTHERS])
    if closed.signals:
        # A process, the group it leads, and -1 for everybody; as the kernel's unsigned words.
        targets = [pid % (1 << 32) for each in closed.signals for pid in (each, -each)]
        for numbers in (*_SIGNALS, *_SCHEDULING):
            lines += _never(numbers[column], 0, [(_EQUAL, pid) for pid in (0xFFFFFFFF, *targets)])
        for numbers, user in zip(_PRIORITIES, _OF_A_USER, strict=True):
            lines += _never(numbers[column], 0, [(_EQUAL, user)])
            lines += _never(numbers[column], 1, [(_EQUAL, pid) for pid in targets])
        lines += [(_EQUAL, 0, 1, _PIDFD_SEND_SIGNAL[column]), denied]  # any folder of /proc is a descriptor
        lines += _never(_FCNTL[column], 1, [(_EQUAL, command) for command in _OWNED])
        lines += _never(_IOCTL[column], 1, [(_EQUAL, request) for request in _OWNED_BY_IOCTL])
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def enforce(code: bytes) -> None:
    """Put a filter in force for this process, for good. It must be unable to gain privileges.

    Args:
        code: What `program` made for this machine.

    Raises:
        OSError: The kernel said no.
    """
    lines = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(lines)), 16)
    libc.syscall(_SET_MODE_FILTER[os.uname().machine], 1, 0, header)


def _only(number: int, argument: int, values: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The call `number` is denied unless the argument is one of the values."""
    body = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return _ruled(number, argument, [*body, (_RETURN, 0, 0, 0x50000 | errno.EPERM)])


def _never(number: int, argument: int, tests: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """The call `number` is denied if one of the tests holds for the argument."""
    body = [(test, len(tests) - at - 1, 0, value) for at, (test, value) in enumerate(tests)]
    end = body.pop()
    return _ruled(number, argument, [*body, (end[0], 0, 1, end[3]), (_RETURN, 0, 0, 0x50000 | errno.EPERM)])


def _ruled(
    number: int, argument: int, body: Sequence[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """`body` with the low half of an argument loaded, only for this call; others go on with the number."""
    rows = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *body, (_LOAD, 0, 0, _NUMBER)]
    return [(_EQUAL, 0, len(rows), number), *rows]
