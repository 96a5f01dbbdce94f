"""Several processes, usually on several hosts, that run one command together.

Each process is started with the same flags. All of them compute; only the first
one, process 0, writes to files and to the terminal. If one ends early, all end,
and the same command resumes from the last finished piece of work.

JAX is imported lazily, because every command imports this module to parse its
flags, and importing JAX takes a second.
"""

from collections.abc import Iterator, Mapping
import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

from absl import flags
from absl import logging
import gin
import numpy as np

# If given, these replace what JAX would find out from the cluster.
_PLACES = ('coordinator_address', 'num_processes', 'process_id')
_TIMEOUTS = ('initialization_timeout', 'heartbeat_timeout')
# These mark errors between processes; other errors are this process's own.
_COMMUNICATION = ('Gloo', 'NCCL', 'UNAVAILABLE', 'DEADLINE_EXCEEDED', 'ABORTED')


# The flags belong to the command, which lists them under --help.
flags.disclaim_key_flags()


def define_flags() -> None:
  """Defines --distributed and the flags that belong to it."""
  flags.DEFINE_bool(
    'distributed',
    False,
    'Run with other processes, each started with the same flags. On Cloud TPU, '
    'GKE and Slurm JAX finds them; elsewhere, give --coordinator_address, '
    '--num_processes and --process_id.',
  )
  flags.DEFINE_string(
    'coordinator_address',
    None,
    'host:port of process 0; the port must be free.',
  )
  flags.DEFINE_integer(
    'num_processes', None, 'How many processes there are.', lower_bound=1
  )
  flags.DEFINE_integer(
    'process_id', None, 'The number of this process, from 0.', lower_bound=0
  )
  flags.DEFINE_integer(
    'initialization_timeout',
    50,
    'Seconds within which all processes have to connect.',
    lower_bound=1,
  )
  flags.DEFINE_integer(
    'heartbeat_timeout',
    100,
    'Seconds after which a silent process counts as dead, and all processes '
    'end.',
    lower_bound=1,
  )
  flags.register_validator(
    'coordinator_address',
    lambda value: value is None or value.rpartition(':')[2].isdigit(),
    'give host:port',
  )


def start() -> None:
  """Joins the other processes, if the flags ask for it.

  It has to be called before any other use of JAX; without these flags, it does
  nothing. If the processes do not come together in time, this one ends with one
  line and exit code 2.
  """
  values = flags.FLAGS.flag_values_dict()
  places: dict[str, Any] = {name: values.get(name) for name in _PLACES}
  if not values.get('distributed') and set(places.values()) == {None}:
    return
  import jax  # noqa: PLC0415

  # JAX would catch SIGTERM for its own use, and the process would go on.
  jax.config.update('jax_enable_preemption_service', False)
  timeout = values['initialization_timeout']
  # JAX aborts a process that waits in vain; this timer ends it before that.
  watch = threading.Timer(timeout, _give_up, [timeout, places])
  watch.daemon = True
  watch.start()
  try:
    jax.distributed.initialize(
      **places,
      initialization_timeout=2 * timeout + 60,
      heartbeat_timeout_seconds=values['heartbeat_timeout'],
    )
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f'--distributed: {str(error).rstrip(".")}: give --coordinator_address, '
      '--num_processes and --process_id if JAX does not find them by itself'
    ) from error
  finally:
    watch.cancel()
  # If a process is lost, JAX names it and aborts the others. Otherwise Python
  # would add a stack trace, as absl asks it to.
  signal.signal(signal.SIGABRT, signal.SIG_DFL)
  if not is_first():
    logging.set_verbosity(logging.ERROR)
  _only_first_writes()
  given = {
    name: value
    for name, value in values.items()
    if flags.FLAGS[name].present
    and name not in ('distributed', *_PLACES, *_TIMEOUTS)
  }
  check_same(
    {
      'command line': repr(sorted(given.items())),
      'configuration': gin.config_str(),
    }
  )


def is_on() -> bool:
  """Returns whether this process runs with others."""
  # A process that has not imported JAX has not joined any others.
  jax = sys.modules.get('jax')
  return jax is not None and jax.distributed.is_initialized()


def is_first() -> bool:
  """Returns whether this process writes: it is process 0, or the only one."""
  return not is_on() or sys.modules['jax'].process_index() == 0


def from_first(value: Any) -> Any:
  """Returns process 0's value, which is JSON, on all."""
  if not is_on():
    return value
  from jax.experimental import multihost_utils  # noqa: PLC0415

  encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
  send = multihost_utils.broadcast_one_to_all
  (size,) = np.asarray(send(np.asarray([encoded.size], np.int32)))
  found = send(np.resize(encoded, size).astype(np.int32))
  return json.loads(np.asarray(found).astype(np.uint8).tobytes())


def check_same(texts: Mapping[str, str]) -> None:
  """Refuses processes whose texts, by name, differ: they would wait forever."""
  if not is_on():
    return
  from jax.experimental import multihost_utils  # noqa: PLC0415

  digests = np.asarray(
    [list(hashlib.sha256(text.encode()).digest()) for text in texts.values()],
    np.int32,
  )
  of_all = np.asarray(multihost_utils.process_allgather(digests))
  differs = np.any(of_all != of_all[0], axis=2)  # [processes, texts]
  for process, row in enumerate(differs):
    names = [
      name for name, is_other in zip(texts, row, strict=True) if is_other
    ]
    if names:
      raise ValueError(
        f'process {process} differs from process 0 in {", ".join(names)}: '
        'start all processes with the same command, code and files'
      )


@contextlib.contextmanager
def all_end() -> Iterator[None]:
  """Ends with the others; after an error, exits at once so that they end too.

  Left to Python, the process would first wait for all others to finish.
  """
  try:
    yield
  except BaseException as error:
    if not is_on():
      raise
    code = _exit_code(error)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(RuntimeError):  # if the devices do not start
      if is_first():
        # Without this process the others die: let them say what is wrong first.
        time.sleep(1)
    os._exit(code)
  if is_on():
    import jax  # noqa: PLC0415

    jax.distributed.shutdown()


def _exit_code(error: BaseException) -> int:
  """Returns the code to exit with, after saying what is wrong."""
  if isinstance(error, SystemExit) and isinstance(error.code, int | None):
    return error.code or 0
  reason = ' '.join(str(error).split())
  if any(word in reason for word in _COMMUNICATION):
    import jax  # noqa: PLC0415

    print(
      f'process {jax.process_index()} of {jax.process_count()} ended early, as '
      'all processes do when one is lost: start the same command again on each '
      f'host ({reason[:200]})',
      file=sys.stderr,
    )
  else:
    traceback.print_exception(error)
  return 1


def _give_up(timeout, places):
  known = ', '.join(
    f'--{name}={value}' for name, value in places.items() if value is not None
  )
  print(
    f'{known or "--distributed"}: not all processes connected within '
    f'{timeout} s: start each of them, and check that process 0 can be reached '
    'at its address and that --num_processes and --process_id are right; or '
    'give a longer --initialization_timeout',
    file=sys.stderr,
    flush=True,
  )
  os._exit(2)


def _only_first_writes():
  """Keeps standard output for what process 0 prints.

  Whatever C++ libraries print there, such as Gloo's greeting, goes to standard
  error.
  """
  kept = os.dup(1) if is_first() else os.open(os.devnull, os.O_WRONLY)
  sys.stdout.flush()
  sys.stdout = os.fdopen(kept, 'w')
  os.dup2(2, 1)
