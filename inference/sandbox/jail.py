"""The script that `inference.sandbox.sandbox` starts in a fresh process: it isolates itself, then runs the program.

It runs as a file, within bubblewrap if that was chosen, and imports nothing of the project. The kernel's locks come
first: Landlock for files and signals, and seccomp for processes, sockets, and what Landlock does not cover: file modes,
owners and times, and objects that outlive their process. An audit hook refuses what nothing else locks.

Every import here delays every program, so there are few: no ``json``, ``signal``, ``contextlib`` or ``traceback``.
"""

from __future__ import annotations

import builtins
import ctypes
import marshal
import os
import resource
import struct
import sys

WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
READ, BOX = READ_FILE | READ_DIR, WRITE_FILE | READ_FILE | READ_DIR | REMOVE_FILE | MAKE_REG | TRUNCATE
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the numbers below, audit name


def numbers(table: str) -> list[tuple[int, int]]:
    """Read a table of system calls, each a name with its numbers on x86_64 and aarch64; 0 if there is none."""
    words = table.split()
    return [(int(x86), int(arm)) for x86, arm in zip(words[1::3], words[2::3], strict=True)]


REFUSED = numbers("""
    fork 57 0  vfork 58 0  execve 59 221  execveat 322 281
    socket 41 198  socketpair 53 199  connect 42 203  io_uring_setup 425 425
    ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  kcmp 312 272  pidfd_send_signal 424 424
    pidfd_open 434 434  pidfd_getfd 438 438  process_madvise 440 440  process_mrelease 448 448
    setpriority 141 140  ioprio_set 251 30  migrate_pages 256 238  move_pages 279 239
    chmod 90 0  fchmod 91 52  fchmodat 268 53  fchmodat2 452 452  chown 92 0  fchown 93 55  lchown 94 0  fchownat 260 54
    utime 132 0  utimes 235 0  futimesat 261 0  utimensat 280 88  setxattrat 463 463  removexattrat 466 466
    setxattr 188 5  lsetxattr 189 6  fsetxattr 190 7  removexattr 197 14  lremovexattr 198 15  fremovexattr 199 16
    file_setattr 469 469  mkdir 83 0  mkdirat 258 34  mknod 133 0  mknodat 259 33  symlink 88 0  symlinkat 266 36
    link 86 0  linkat 265 37  splice 275 76  tee 276 77  vmsplice 278 75  io_submit 209 2
    shmget 29 194  shmctl 31 195  shmat 30 196  semget 64 190  semctl 66 191  semtimedop 220 192  semop 65 193
    msgget 68 186  msgctl 71 187  msgrcv 70 188  msgsnd 69 189  mq_open 240 180  mq_unlink 241 181
    mq_timedsend 242 182  mq_timedreceive 243 183  mq_notify 244 184  mq_getsetattr 245 185  memfd_create 319 279
    memfd_secret 447 447  add_key 248 217  request_key 249 218  keyctl 250 219  userfaultfd 323 282
    perf_event_open 298 241  bpf 321 280  unshare 272 97  setns 308 268  mount 165 40  umount2 166 39  chroot 161 51
    pivot_root 155 41  open_by_handle_at 304 265  open_tree 428 428  move_mount 429 429  fsopen 430 430
""")
OWN = numbers("""
    kill 62 129  tkill 200 130  tgkill 234 131  rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240  prlimit64 302 261
    sched_setparam 142 118  sched_setscheduler 144 119  sched_setaffinity 203 122  sched_setattr 314 274
""")  # their first argument is a process, and only the process itself is allowed
SIGNAL_OWNERS = 8, 10, 15  # F_SETOWN, F_SETSIG, F_SETOWN_EX of fcntl, which make the kernel send signals
# Calls of which some values of an argument are refused: numbers, the argument's position, and the values.
VALUES = (
    ((72, 25), 1, SIGNAL_OWNERS),  # fcntl
    ((16, 29), 1, (0x40305828, 0x4030582A, 0x40305839)),  # ioctl: older ways to call fallocate
    ((157, 167), 0, (4,)),  # prctl: PR_SET_DUMPABLE, which hides from the parent how much is written
)
FALLOCATE, MMAP, CLONE, CLONE3 = (285, 47), (9, 222), (56, 220), 435
MAP_SHARED, MAP_ANONYMOUS, CLONE_THREAD = 0x1, 0x20, 0x10000

libc = ctypes.CDLL(None, use_errno=True)


def limit_resources(limits: dict[str, int]) -> None:
    """Limit the resources of the process; a soft limit that equals the hard limit cannot be raised again."""
    wanted = {
        "RLIMIT_CPU": limits["cpu_seconds"],
        "RLIMIT_AS": limits["memory_bytes"],
        "RLIMIT_FSIZE": limits["file_bytes"],
        "RLIMIT_NOFILE": limits["open_files"],
        "RLIMIT_CORE": 0,
    }
    for name, value in wanted.items():
        lower(getattr(resource, name), value)


def lower(kind: int, value: int) -> None:
    """Set a resource limit if the system has it, but never above the inherited limit."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(kind, (value, value))
    except (ValueError, OSError):  # macOS has no limit on address space
        pass


def renounce() -> None:
    """Die with the parent process, never gain privileges, and give up those of root."""
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))


def landlock(readable: list[str], box: str) -> bool:
    """Allow reading only in the given folders, and writing only in the box: no folders, links, devices.

    Returns whether the kernel enforces it, which needs the third version of Landlock (Linux 6.2).
    """

    def call(*arguments: object) -> int:
        return libc.syscall(*(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))

    version = call(444, None, 0, 1)
    if version < 3:
        return False
    files = (1 << (16 if version >= 5 else 15)) - 1  # every right this version knows is handled, so none is left open
    handled = struct.pack("QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]  # files, TCP, signals
    ruleset = call(444, handled, len(handled), 0)
    if ruleset < 0:
        return False
    for path, rights in [*((path, READ) for path in readable), ("/dev/null", BOX), (box, BOX)]:
        if os.path.exists(path):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if os.path.isdir(path) else rights & (READ_FILE | WRITE_FILE | TRUNCATE)
            added = call(445, ruleset, 1, struct.pack("=Qi", allowed, folder), 0)
            os.close(folder)
            if added:
                return False
    locked = call(446, ruleset, 0) == 0
    os.close(ruleset)
    return locked


def seccomp() -> bool:
    """Refuse the system calls above. Returns whether the kernel enforces it."""
    if os.uname().machine not in ARCHITECTURES or sys.maxsize < 2**32:
        return False
    column, architecture = ARCHITECTURES[os.uname().machine]
    load, equal, at_least, has, end = 0x20, 0x15, 0x35, 0x45, 0x06
    # EPERM is 1, EOPNOTSUPP 95, ENOSYS 38
    allow, refuse, unsupported, unknown, kill = 0x7FFF0000, 0x50001, 0x5005F, 0x50026, 0x80000000

    def argument(position: int) -> tuple[int, int, int, int]:
        return load, 0, 0, 16 + 8 * position  # its lower half

    def rule(number: int, *tests: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        return [(equal, 0, len(tests), number), *tests]

    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:
        code += [(at_least, 0, 1, 0x40000000), (end, 0, 0, refuse)]  # the x32 system calls have other numbers
    for number in (call[column] for call in REFUSED if call[column]):
        code += rule(number, (end, 0, 0, refuse))
    # Libraries do without these two: posix_fallocate writes instead, and clone takes the place of clone3, whose flags a
    # filter cannot read.
    code += rule(FALLOCATE[column], (end, 0, 0, unsupported))
    code += rule(CLONE3, (end, 0, 0, unknown))
    ends = (end, 0, 0, refuse), (end, 0, 0, allow)
    code += rule(CLONE[column], argument(0), (has, 1, 0, CLONE_THREAD), *ends)
    # What is written to a shared mapping of a file is not counted as written.
    code += rule(MMAP[column], argument(3), (has, 0, 2, MAP_SHARED), (has, 1, 0, MAP_ANONYMOUS), *ends)
    for numbers_of_call, position, values in VALUES:
        tests = [test for value in values for test in ((equal, 0, 1, value), (end, 0, 0, refuse))]
        code += rule(numbers_of_call[column], argument(position), *tests, (end, 0, 0, allow))
    for number in (call[column] for call in OWN):
        code += rule(number, argument(0), (equal, 2, 0, os.getpid()), (equal, 1, 0, 0), *ends)
    code += [(end, 0, 0, allow)]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = struct.pack("HP", len(code), ctypes.addressof(instructions))
    return libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def watch(readable: list[str], box: str, files: bool, processes: bool) -> None:
    """Refuse by an audit hook what the kernel does not: files outside the box, or processes, sockets, native code."""
    roots = [os.path.realpath(path) for path in (*readable, box)]
    writable = [os.path.realpath(box), "/dev/null"]
    names = ("remove", "rename", "mkdir", "rmdir", "link", "symlink", "chmod", "chown", "truncate", "utime")
    changes = {f"os.{name}" for name in (*names, "setxattr", "removexattr", "chflags", "lockf")}
    looks = {"os.listdir", "os.scandir", "os.getxattr", "os.listxattr"}
    others = {"os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}
    others |= {"os.kill", "os.killpg", "resource.prlimit", "pty.spawn", "signal.pthread_kill"}

    def is_in(path: object, folders: list[str]) -> bool:
        path = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        return any(path == folder or path.startswith(folder + "/") for folder in folders)

    def refuse(event: str, what: object = "") -> None:
        raise PermissionError(f"the sandbox refuses {event} {what}")

    def hook(event: str, args: tuple) -> None:
        if files:
            if event == "open" and isinstance(args[0], (str, bytes)):
                is_written = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
                # a descriptor of another folder would let later paths begin there
                is_other = os.path.isdir(args[0]) and not is_in(args[0], writable)
                if is_other or not is_in(args[0], writable if is_written else roots):
                    refuse(event, args[0])
            elif event == "os.chdir" and isinstance(args[0], (str, bytes)) and not is_in(args[0], writable):
                refuse(event, args[0])
            elif event in changes:
                if event == "os.mkdir" or any(not is_in(a, writable) for a in args if isinstance(a, (str, bytes))):
                    refuse(event, args)
            elif event in looks and args[0] is not None and not isinstance(args[0], int) and not is_in(args[0], roots):
                refuse(event, args[0])
        if processes:
            sends_signals = event == "fcntl.fcntl" and args[1] in SIGNAL_OWNERS
            if event in others or event.startswith("socket.") or sends_signals:
                refuse(event)
            if event.startswith("ctypes."):  # native code meets no hook; who imports ctypes can do without
                raise ImportError("the sandbox has no ctypes")

    sys.addaudithook(hook)


def main() -> None:
    """Read the order, isolate the process, run the program, and report its end to the given file descriptor."""
    order = marshal.load(sys.stdin.buffer)
    report, box = int(sys.argv[1]), os.getcwd()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    limit_resources(order["limits"])
    isolation, readable = order["isolation"], order["readable"]
    is_linux = sys.platform == "linux"
    if is_linux:
        renounce()
    locks = {
        "landlock": is_linux and isolation in ("bubblewrap", "landlock") and landlock(readable, box),
        "seccomp": is_linux and isolation != "hook" and seccomp(),
    }
    if not locks.get(isolation, True):
        sys.exit(f"the kernel has no {isolation}")
    if not locks["seccomp"]:
        lower(resource.RLIMIT_NPROC, 0)
        for name in [name for name in sys.modules if name.split(".")[0] in ("ctypes", "_ctypes")]:
            del sys.modules[name]
    active = [name for name, is_active in locks.items() if is_active]
    files, processes = not locks["landlock"] and isolation != "bubblewrap", not locks["seccomp"]
    if files or processes:
        watch(readable, box, files, processes)
        active.append("hook")
    os.write(report, f"{' '.join(active)}\n".encode())
    sys.path.extend(order["packages"])  # without the module `site`, whose .pth files take longer than everything here
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    end = "an exception that cannot be printed"
    try:
        code = compile(order["program"], "program.py", "exec", dont_inherit=True)
        exec(code, {"__name__": "program", "__builtins__": __builtins__})
        end = order["token"]
    except SystemExit:
        end = ""
    except BaseException as error:
        try:
            end = f"{type(error).__name__}: {error}"[:200]
            own = error.__traceback__ and error.__traceback__.tb_next
            sys.__excepthook__(type(error), error.with_traceback(own), own)
        except BaseException:  # the program defines how its exception is printed
            pass
    try:
        sys.stdout.flush()
    except BaseException:  # the program may have closed it
        pass
    os.write(report, end.encode())
    os._exit(0)


if __name__ == "__main__":
    main()
