"""Runs one program within limits; `sandbox.py` starts this as a process.

Reads JSON from standard input: the program, the limits, and a secret that tells
this file's answer on standard output from what the program may write there. It
uses only the standard library and nothing of the package, which the process has
no path to.

A seccomp filter leaves the process the few system calls that a computation
needs. Linux takes all other calls away, permanently: seccomp(2). A call that is
not listed here fails as if the kernel did not have it. The process therefore
cannot start another process or thread, open a socket, send a signal, set a
timer, or make a call that a later kernel adds. Files can be opened for reading
only.
"""

import ctypes
import errno
import functools
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import NoReturn

# Each call and its numbers on x86-64 and on aarch64, from <asm/unistd.h>; -: no
# such call.
_ALLOWED = """
  read 0 63                 readv 19 65               pread64 17 67
  write 1 64                writev 20 66              lseek 8 62
  close 3 57                dup 32 23                 stat 4 -
  fstat 5 80                lstat 6 -                 newfstatat 262 79
  statx 332 291             access 21 -               faccessat 269 48
  faccessat2 439 439        readlink 89 -             readlinkat 267 78
  getdents64 217 61         getcwd 79 17              mmap 9 222
  mprotect 10 226           munmap 11 215             mremap 25 216
  madvise 28 233            brk 12 214                futex 202 98
  sched_yield 24 124        rt_sigaction 13 134       rt_sigprocmask 14 135
  rt_sigreturn 15 139       sigaltstack 131 132       restart_syscall 219 128
  clock_gettime 228 113     clock_getres 229 114      clock_nanosleep 230 115
  nanosleep 35 101          gettimeofday 96 169       time 201 -
  times 100 153             getrusage 98 165          getrandom 318 278
  uname 63 160              sysinfo 99 179            getpid 39 172
  getppid 110 173           gettid 186 178            getuid 102 174
  geteuid 107 175           getgid 104 176            getegid 108 177
  sched_getaffinity 204 123 exit 60 93                exit_group 231 94
"""
_OPENAT = (257, 56)
# The kernel's constants for the architectures, AUDIT_ARCH_*.
_ARCHITECTURES = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}
_WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC

# Classic BPF: load a word, jump if equal, jump if a bit is set, return.
_LOAD, _EQUAL, _HAS_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
# Offsets in struct seccomp_data of the number, the architecture and the lower
# half of the third argument, which holds the flags of openat.
_NUMBER, _ARCHITECTURE, _FLAGS = 0, 4, 32
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_MODE_FILTER = 2


def main() -> None:
  """Confines this process, then runs the program in it."""
  task = json.load(sys.stdin)
  end = functools.partial(_end, os.dup(1), task['secret'])
  # The program's input is empty, and what it prints is discarded.
  nowhere = os.open(os.devnull, os.O_RDWR)
  for descriptor in range(3):
    os.dup2(nowhere, descriptor)
  try:
    _limit(task['limits'])
    _wall_in(task['parent'])
  # Whatever goes wrong here, nothing runs unconfined.
  except Exception as error:
    end('refused', str(error) or type(error).__name__)
  try:
    exec(compile(task['program'], 'program', 'exec'), {})
  # Also SystemExit: a program that exits early has not passed its tests.
  except BaseException as error:
    end('failed', type(error).__name__)
  end('passed', '')


def _limit(limits: dict[str, int]) -> None:
  for name, value in {**limits, 'NPROC': 0, 'CORE': 0}.items():
    kind = getattr(resource, f'RLIMIT_{name}')
    _, ceiling = resource.getrlimit(kind)
    if ceiling != resource.RLIM_INFINITY:
      value = min(value, ceiling)
    resource.setrlimit(kind, (value, value))


def _wall_in(parent: int) -> None:
  """Ends this process with its parent, and gives up most system calls."""
  _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:
    raise OSError('the process that started this has ended')
  machine = os.uname().machine
  if machine not in _ARCHITECTURES:
    raise OSError(
      f'there is no system call filter for {sys.platform} on {machine}'
    )
  program = _program(list(_ARCHITECTURES).index(machine))
  code = ctypes.create_string_buffer(program, len(program))
  header = ctypes.create_string_buffer(
    struct.pack('HP', len(program) // 8, ctypes.addressof(code))
  )
  _prctl(_PR_SET_NO_NEW_PRIVS, 1)
  _prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(header))
  try:
    socket.socket()
  except OSError:
    return
  raise OSError('the system call filter leaves the network open')


def _prctl(option: int, *arguments: int) -> None:
  if sys.platform != 'linux':
    raise OSError(f'there is no system call filter for {sys.platform}')
  libc = ctypes.CDLL(None, use_errno=True)
  libc.prctl.argtypes = [ctypes.c_int, *4 * [ctypes.c_ulong]]
  if libc.prctl(option, *arguments, *(4 - len(arguments)) * [0]):
    reason = os.strerror(ctypes.get_errno())
    raise OSError(f'the system call filter cannot be set ({reason})')


def _program(column: int) -> bytes:
  missing = _FAIL | errno.ENOSYS
  steps = [
    (_LOAD, 0, 0, _ARCHITECTURE),
    (_EQUAL, 1, 0, list(_ARCHITECTURES.values())[column]),
    (_RETURN, 0, 0, _KILL),
    (_LOAD, 0, 0, _NUMBER),
  ]
  for number in _ALLOWED.split()[1 + column :: 3]:
    if number != '-':
      steps += [(_EQUAL, 0, 1, int(number)), (_RETURN, 0, 0, _ALLOW)]
  steps += [
    (_EQUAL, 1, 0, _OPENAT[column]),
    (_RETURN, 0, 0, missing),
    (_LOAD, 0, 0, _FLAGS),
    (_HAS_BITS, 0, 1, _WRITES),
    (_RETURN, 0, 0, _FAIL | errno.EACCES),
    (_RETURN, 0, 0, _ALLOW),
  ]
  return b''.join(struct.pack('HBBI', *step) for step in steps)


def _end(descriptor: int, secret: str, kind: str, reason: str) -> NoReturn:
  """Writes this process's answer and ends the process."""
  record = {'secret': secret, 'kind': kind, 'reason': reason}
  os.write(descriptor, json.dumps(record).encode())
  # Skips whatever the program left behind, such as exit handlers.
  os._exit(0)


if __name__ == '__main__':
  main()
