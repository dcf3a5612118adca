"""The machine and the process: memory, cores, the C library's allocator, signals, the disk.

All that differs between Linux, macOS and Windows is here, with a fallback where a call is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CONTROL_GROUP = Path("/sys/fs/cgroup")
PROCESS_GROUPS = Path("/proc/self/cgroup")
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_HEAP_BLOCK = 32 << 20  # glibc accepts no higher threshold
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
SAME_REQUEST_SECONDS = 1.0


def available_memory(device: torch.device | str = "cpu") -> int | None:
    """Bytes that can be allocated without swapping; None where that is unknown."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    known = [size for size in (_machine_memory(), _container_memory()) if size is not None]
    return min(known, default=None)


def _machine_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    value = fields.get("MemAvailable", "").split()
    return int(value[0]) * 1024 if value else None


def _container_memory() -> int | None:
    """What the control groups that this process is in may still allocate; None without a limit."""
    try:
        lines = PROCESS_GROUPS.read_text().splitlines()
    except OSError:
        return None
    free: list[int] = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        top = CONTROL_GROUP / "memory" if controllers else CONTROL_GROUP
        folder = top / path.lstrip("/")
        groups = [folder, *folder.parents]  # a limit of any group above holds too
        free += [
            size
            for group in groups[: groups.index(top) + 1]
            if (size := _free_in_group(group, version_1=bool(controllers))) is not None
        ]
    return min(free, default=None)


def _free_in_group(group: Path, version_1: bool) -> int | None:
    """Limit less use, where pages of files that were read count as free."""
    limit, use, cached = "memory.max", "memory.current", "inactive_file"
    if version_1:
        limit, use = "memory.limit_in_bytes", "memory.usage_in_bytes"
        cached = "total_inactive_file"
    try:
        most, used = (group / limit).read_text().strip(), int((group / use).read_text())
        stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(most) - used + int(stat.get(cached, 0)) if most.isdigit() else None


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory instead of returning it to the system.

    A training step frees gigabytes and allocates them again; if they are returned in between, every
    page is faulted in and zeroed once more. The process keeps the memory until it ends. Returns
    False where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows
        return False
    settings = {
        M_MMAP_THRESHOLD: LARGEST_HEAP_BLOCK,
        M_TRIM_THRESHOLD: 2**31 - 1,
        M_TOP_PAD: 64 << 20,
    }
    return all(mallopt(name, value) == 1 for name, value in settings.items())


PR_SET_PDEATHSIG = 1


def cores() -> int:
    """The cores that this process may use; all of the machine's where that is unknown."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class SpinLimiter:
    """Context manager that lets OpenMP's threads sleep while other programs want their cores.

    A thread that waits for the others of a parallel operation spins for some milliseconds before it
    sleeps. With a core for each thread that is fastest. When another program runs too, a spinning
    thread takes the core from the thread it waits for, and every operation lasts a time slice.

    libgomp spins 300,000 times, but only 100 times while the process has more OpenMP threads than
    there are cores. So a team of idle threads is kept as long as the threads of this process wait
    for cores. The number of threads at work, and so the rounding, does not change. Has no effect
    without Linux and libgomp, with one thread, if OMP_WAIT_POLICY or GOMP_SPINCOUNT is set, or
    inside another.
    """

    SECONDS = 0.1
    """Between two looks at the time that threads have waited."""
    BUSY, QUIET = 0.1, 0.05
    """Limit above this waiting time per second, summed over threads; stop limiting below."""
    _active: SpinLimiter | None = None

    def __init__(self) -> None:
        self.limited = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SpinLimiter:
        chosen = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
        if SpinLimiter._active is None and not chosen and seconds_without_core() is not None:
            SpinLimiter._active = self
            self._thread = threading.Thread(target=self._watch, name="parcae-spin", daemon=True)
            self._thread.start()
        return self

    def _watch(self) -> None:
        team: _IdleTeam | None = None
        before, then = seconds_without_core() or 0.0, time.monotonic()
        while not self._end.wait(self.SECONDS):
            waited, now = seconds_without_core() or 0.0, time.monotonic()
            share = (waited - before) / (now - then)
            before, then = waited, now
            if team is None and share > self.BUSY:
                team = _IdleTeam.start_if_useful()
            elif team is not None and share < self.QUIET:
                team.end()
                team = None
            self.limited = team is not None
        if team is not None:
            team.end()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._end.set()
            self._thread.join()
            SpinLimiter._active = None


def seconds_without_core() -> float | None:
    """How long the threads of this process were ready to run, but had no core; None if unknown."""
    total = 0
    try:
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # has just ended
                total += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return total / 1e9


class _IdleTeam(threading.Thread):
    """A thread with a team of OpenMP threads that do nothing, until `end` is called."""

    def __init__(self, parallel: Callable[..., None]) -> None:
        super().__init__(name="parcae-idle-team", daemon=True)
        self._parallel, self._end = parallel, threading.Event()

    @classmethod
    def start_if_useful(cls) -> _IdleTeam | None:
        """None where no threads spin: without PyTorch, with one thread, without libgomp."""
        threads = getattr(sys.modules.get("torch"), "get_num_threads", None)
        if threads is None or threads() == 1:  # None also while PyTorch is being imported
            return None
        try:
            maps = Path("/proc/self/maps").read_text().splitlines()
            files = (line.split(maxsplit=5)[-1] for line in maps)
            path = next(file for file in files if Path(file).name.startswith("libgomp"))
            team = cls(ctypes.CDLL(path).GOMP_parallel)
        except (AttributeError, OSError, StopIteration):
            return None
        team.start()
        return team

    def run(self) -> None:
        do_nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL)
        self._parallel(do_nothing, None, ctypes.c_uint(cores() + 1), ctypes.c_uint(0))
        self._end.wait()

    def end(self) -> None:
        self._end.set()
        self.join()


def end_with_parent() -> bool:
    """Receive SIGTERM when the parent process dies, even if it is killed. False if not on Linux."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError, TypeError):
        return False
    return prctl(PR_SET_PDEATHSIG, signal.SIGTERM) == 0


def ignore_signal(name: str) -> None:
    """Ignore a signal, such as SIGUSR2, where the system has it."""
    if hasattr(signal, name):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def allow_open_files(count: int) -> int:
    """Let this process have `count` files and connections open, if the system allows it. Returns
    how many it may have, at most `count`."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        return soft
    return allowed


def flush(path: Path) -> None:
    """Force a file's content, or a folder's list of names, to disk."""
    windows = os.name == "nt"
    if windows and path.is_dir():  # it has no such call for folders
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_private(path: Path) -> bool:
    """Whether only this user and the system may change the file or folder. On Windows, which has
    other permissions, it is assumed."""
    if not hasattr(os, "getuid"):
        return True
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def process_exists(number: int) -> bool:
    """Whether a process of this id runs, of any user; True where that cannot be known."""
    if os.name == "nt":  # where signal 0 would end it
        return True
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user
        return True
    return True


def cpu_seconds(process: int) -> tuple[int, float] | None:
    """When a process started, and its processor time in seconds; None where /proc is missing."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system, start = int(fields[11]), int(fields[12]), int(fields[19])
    return start, (user + system) / os.sysconf("SC_CLK_TCK")


class StopSignals:
    """Context manager in which a stop signal sets `asked` instead of ending the process.

    The signals are Ctrl-C, SIGTERM and, where a terminal may be closed, SIGHUP. Ctrl-C and SIGHUP
    stay ignored where the process ignores them, as under `nohup`; SIGTERM does not: a launcher that
    ignores it, such as the script for Slurm, passes that on. A second one has its usual effect at
    once: Ctrl-C raises KeyboardInterrupt, SIGTERM ends the process. Within a second of the first,
    SIGTERM and SIGHUP are taken for the same request: a cluster and its launcher both send one.
    """

    def __init__(
        self, signals: Sequence[signal.Signals] = STOP_SIGNALS, message: str | None = None
    ) -> None:
        """`message` is written to standard error at the first signal."""
        self.asked = False
        self._signals = signals
        self._message = message
        self._asked_at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            handled = [
                s
                for s in self._signals
                if s == signal.SIGTERM or signal.getsignal(s) is not signal.SIG_IGN
            ]
            self._before = {s: signal.signal(s, self._handle) for s in handled}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._asked_at = True, time.monotonic()
            if self._message is not None:
                with contextlib.suppress(OSError):  # not print: it may be interrupted right here
                    os.write(2, f"{self._message}\n".encode())
        elif number == signal.SIGINT or time.monotonic() - self._asked_at > SAME_REQUEST_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()


def cache_folder() -> Path:
    """The user's cache, for compiled kernels and what was measured with them. No data is in it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "parcae"
