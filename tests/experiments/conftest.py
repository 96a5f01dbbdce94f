"""Fixtures that run the commands as a user does, on a tiny random model."""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import signal
import socket
import string
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors
import tokenizers

import specsample
from specsample import text
from specsample.text import tokenizer_files

# Seconds per command; each takes at most ten on two cores.
_TIMEOUT = 300
_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Some tokens look like markup to a terminal library.
_END = '<|end|>'
_TEXT = (*string.digits, *string.ascii_letters, *string.punctuation, *' \né')
_TOKENS = (_END, *_TEXT, '[bold]', '[/]', ':smile:', ' the')
_CONFIG = {
  'model_type': 'llama',
  'vocab_size': len(_TOKENS),
  'num_hidden_layers': 2,
  'hidden_size': 48,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 64,
  'max_position_embeddings': 512,
}
_TEMPLATE = (
  '{% for message in messages %}{{ message.role }}: {{ message.content }}\n'
  '{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}'
)


class _Terminal(io.StringIO):
  """A text stream that claims to be a terminal."""

  def isatty(self):
    """See `io.IOBase`."""
    return True


@pytest.fixture
def in_terminal(monkeypatch):
  """A function that returns the unstyled text a call prints at some width."""
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.delenv('FORCE_COLOR', raising=False)

  def printed(columns, call, *arguments):
    monkeypatch.setenv('COLUMNS', str(columns))
    with contextlib.redirect_stdout(_Terminal()) as terminal:
      call(*arguments)
    return re.sub('\x1b\\[[0-9;]*m', '', terminal.getvalue())

  return printed


@pytest.fixture(scope='session')
def checkpoint(tmp_path_factory):
  """A folder with a tiny Llama model, its tokenizer and a chat template."""
  folder = tmp_path_factory.mktemp('tiny')
  (folder / 'config.json').write_text(json.dumps(_CONFIG))
  safetensors.save_file(_weights(), folder / 'model.safetensors')
  vocabulary = {token: i for i, token in enumerate(_TOKENS)}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  backend.decoder = tokenizers.decoders.Fuse()
  tokenizer = text.Tokenizer(
    backend=backend,
    named_tokens={'eos_token': _END},
    chat_template=_TEMPLATE,
  )
  tokenizer_files.save(tokenizer, folder)
  return folder


@pytest.fixture(scope='session')
def target(checkpoint):
  """The tiny model of `checkpoint`, loaded."""
  return specsample.load(checkpoint)


def _weights():
  rng = np.random.default_rng(0)
  dim, mlp_dim = _CONFIG['hidden_size'], _CONFIG['intermediate_size']
  draw = lambda rows, columns: (
    rng.normal(size=(rows, columns)) / np.sqrt(columns)
  )
  weights = {
    'model.embed_tokens': draw(len(_TOKENS), dim) * np.sqrt(dim),
    'model.norm': np.ones(dim),
    'lm_head': draw(len(_TOKENS), dim),
  }
  # Its logit is always 0 and never the largest, so no text ends early.
  weights['lm_head'][_TOKENS.index(_END)] = 0
  for i in range(_CONFIG['num_hidden_layers']):
    layer = {
      'self_attn.q_proj': draw(dim, dim),
      'self_attn.k_proj': draw(dim // 2, dim),
      'self_attn.v_proj': draw(dim // 2, dim),
      'self_attn.o_proj': draw(dim, dim),
      'mlp.gate_proj': draw(mlp_dim, dim),
      'mlp.up_proj': draw(mlp_dim, dim),
      'mlp.down_proj': draw(dim, mlp_dim),
      'input_layernorm': np.ones(dim),
      'post_attention_layernorm': np.ones(dim),
    }
    weights |= {f'model.layers.{i}.{name}': x for name, x in layer.items()}
  return {f'{name}.weight': x.astype('f') for name, x in weights.items()}


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a command ended and what it printed."""

  code: int
  out: str
  err: str

  @property
  def remarks(self) -> list[str]:
    """The lines on standard error, except for progress messages."""
    lines = self.err.splitlines()
    return [line for line in lines if not line.endswith(' ...')]

  def check_refused(self, words: str) -> None:
    """Checks that one line refuses the input; ` ... ` stands for any text."""
    assert self.code == 2, self.err
    assert self.out == ''
    (line,) = self.remarks
    assert re.search('.*'.join(map(re.escape, words.split(' ... '))), line), (
      line
    )


@pytest.fixture(scope='session')
def commands(tmp_path_factory):
  """Starts the commands; they share the tests' compilation cache."""
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR')
  found = Commands(cache or str(tmp_path_factory.mktemp('cache')))
  yield found
  found.close()


@pytest.fixture(scope='session')
def cpu_devices():
  """The function that returns variables for a process with many devices."""

  def variables(count):
    flags = (
      os.environ.get('XLA_FLAGS', ''),
      f'--xla_force_host_platform_device_count={count}',
    )
    return {'XLA_FLAGS': ' '.join(flags)}

  return variables


@pytest.fixture(scope='session')
def tiny(checkpoint):
  """Flags that replace the default model by the tiny one."""
  binding = f"target/specsample.load.name_or_path = '{checkpoint}'"
  return (f'--gin_bindings={binding}',)


@pytest.fixture(scope='session')
def tiny_methods(tiny):
  """The flags of `tiny`, and drafters for it."""
  bindings = (
    'Ngram.num_draft_tokens = 4',
    'Skip.num_draft_tokens = 2',
    'Skip.layers = (0,)',
  )
  return (*tiny, *(f'--gin_bindings={binding}' for binding in bindings))


@pytest.fixture(scope='session')
def tiny_evaluate(tiny_methods):
  """The flags of `tiny_methods`, for the methods that need no training."""
  repeats = '--gin_bindings=Evaluation.repeats = 4'
  return ('--gin_file=configs/runs/evaluate.gin', *tiny_methods, repeats)


@pytest.fixture(scope='session')
def greedy(checkpoint):
  """A function that continues a prompt with the tiny model: (tokens, text).

  The prompt may be a list of tokens.
  """
  loaded = specsample.load(checkpoint)

  def generate(prompt, max_new_tokens, chat=False):
    is_text = isinstance(prompt, str)
    tokens = loaded.tokenizer.encode(prompt) if is_text else list(prompt)
    if chat:
      message = {'role': 'user', 'content': prompt}
      tokens = loaded.tokenizer.encode_chat([message])
    prompts, lengths = specsample.pad_prompts([tokens])
    output = specsample.generate(
      {'target': loaded.params},
      prompts,
      lengths,
      jax.random.key(0),
      model=loaded.model,
      drafter=specsample.drafters.NoDraft(),
      verify=specsample.verify.chain,
      sampling=specsample.Sampling(),
      max_new_tokens=max_new_tokens,
    )
    tokens = np.asarray(output.tokens)[0].tolist()
    return tokens, loaded.tokenizer.decode(tokens)

  return generate


# Measuring the memory bandwidth fully would take each command ten seconds.
_COMMAND = """
import runpy, sys
from experiments.timing import roofline
roofline._STREAM_BYTES = 1 << 20

def run(name, *arguments):
  module = f'experiments.{name}'
  sys.argv = [name, *arguments]
  sys.orig_argv = [sys.executable, '-m', module, *arguments]
  runpy.run_module(module, run_name='__main__')
"""
_ONE = f"""
{_COMMAND}
run(*sys.argv[1:])
"""
# Runs the commands that it reads, one per line, in forks of a process that has
# done the shared imports, which take longer than most commands.
_SERVER = f"""
{_COMMAND}
import gc, json, os, signal, tempfile
from experiments.certificate import terminal
from experiments.decoding import generating
from experiments.evaluation import results
from experiments.timing import benchmarking
from experiments.training import results as training_results
from specsample.models import huggingface
gc.freeze()  # or each fork would copy all of it as it ends
for line in sys.stdin:
  with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    child = os.fork()
    if not child:
      signal.alarm({_TIMEOUT})
      os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
      os.dup2(out.fileno(), 1)
      os.dup2(err.fileno(), 2)
      run(*json.loads(line))
      sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = [os.pread(f.fileno(), 1 << 20, 0).decode() for f in (out, err)]
  print(json.dumps([code, *texts]), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Commands:
  """Runs `python -m experiments.<name>` from the root of the repository."""

  cache: str
  # Keyed by their environment variables, which a process reads on import.
  servers: dict = dataclasses.field(default_factory=dict, init=False)

  def start(self, name: str, *arguments: str, **options) -> subprocess.Popen:
    """Starts a command.

    `options` are those of `subprocess.Popen`, besides `variables` to set in the
    environment.
    """
    # A child reacts to Ctrl-C only if its parent doesn't ignore it, as the
    # background jobs of a script do.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
      how = ('-m', f'experiments.{name}')
      if name == 'evaluate':
        how = ('-c', _ONE, name)
      return self._start(*how, *arguments, **options)
    finally:
      signal.signal(signal.SIGINT, handler)

  def run(self, name: str, *arguments: str) -> Outcome:
    """Runs a command and returns its outcome."""
    (outcome,) = self.run_all([(name, *arguments)])
    return outcome

  def complete(self, name: str, *arguments: str) -> Outcome:
    """Runs a command that has to succeed and returns its outcome."""
    outcome = self.run(name, *arguments)
    assert outcome.code == 0, outcome.err
    return outcome

  def wait(
    self, is_done: Callable[[], bool], *processes: subprocess.Popen
  ) -> None:
    """Waits for something that running commands do."""
    deadline = time.monotonic() + _TIMEOUT
    while not is_done():
      for process in processes:
        assert process.poll() is None, process.stderr.read().decode()
      assert time.monotonic() < deadline
      time.sleep(0.001)

  def kill_once(self, is_done: Callable[[], bool], *call: str, **options):
    """Starts a command and kills it as soon as something is done."""
    process = self.start(*call, **options)
    self.wait(is_done, process)
    process.kill()
    process.communicate()

  def finish(
    self, process: subprocess.Popen, stdin: bytes | None = None
  ) -> Outcome:
    """Waits for a running command and returns its outcome."""
    try:
      out, err = process.communicate(stdin, _TIMEOUT)
    finally:
      process.kill()
    return Outcome(process.returncode, out.decode(), err.decode())

  def start_on_two_hosts(
    self,
    name: str,
    *arguments: str,
    flags: Sequence[Sequence[str]] = ((), ()),
    folders: Sequence[pathlib.Path] = (_ROOT, _ROOT),
    **options,
  ) -> list[subprocess.Popen]:
    """Starts a command in two processes that work together.

    `flags` and `folders` are those of each; `options` are as in `start`.
    """
    with socket.create_server(('localhost', 0)) as server:
      port = server.getsockname()[1]
    address = (f'--coordinator_address=localhost:{port}', '--num_processes=2')
    return [
      self.start(
        *(name, *arguments, *address, f'--process_id={i}', *own),
        cwd=folder,
        **options,
      )
      for i, (own, folder) in enumerate(zip(flags, folders, strict=True))
    ]

  def run_on_two_hosts(self, *call: str, **options) -> list[Outcome]:
    """Does the same and returns the outcomes of both."""
    processes = self.start_on_two_hosts(*call, **options)
    # Both at once: one that waits for its output to be read stops the other.
    with futures.ThreadPoolExecutor() as pool:
      return list(pool.map(self.finish, processes))

  def run_all(
    self, calls: Sequence[Sequence[str]], variables: Mapping[str, str] = {}
  ) -> list[Outcome]:
    """Runs commands (name, *arguments) one after another.

    They run in forks of one process; tests of the start itself use `start`.
    """
    key = tuple(variables.items())
    if key not in self.servers:
      self.servers[key] = self._start(
        *('-c', _SERVER), stdin=subprocess.PIPE, stderr=None, variables=key
      )
    server = self.servers[key]
    outcomes = []
    for call in calls:
      server.stdin.write(json.dumps(call).encode() + b'\n')
      server.stdin.flush()
      line = server.stdout.readline()
      if not line:
        raise RuntimeError(f'the process behind run ended at {call}')
      outcomes.append(Outcome(*json.loads(line)))
    return outcomes

  def close(self) -> None:
    """Ends the processes that `run` uses."""
    for server in self.servers.values():
      server.communicate()

  def cached(self) -> list[pathlib.Path]:
    """Returns the files of the programs that have been compiled."""
    return list(pathlib.Path(self.cache).rglob('jit_*'))

  def _start(self, *arguments, variables=(), **options):
    defaults = {
      'cwd': _ROOT,
      'stdin': subprocess.DEVNULL,
      'stdout': subprocess.PIPE,
      'stderr': subprocess.PIPE,
    }
    # Leave out variables that rich reads and those of this test session.
    environment = {
      name: value
      for name, value in os.environ.items()
      if name
      not in (
        *('COLUMNS', 'FORCE_COLOR', 'NO_COLOR', 'JAX_COMPILATION_CACHE_DIR'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS',
      )
    }
    environment |= {
      'JAX_PLATFORMS': 'cpu',
      'TERM': 'xterm-256color',
      'XDG_CACHE_HOME': self.cache,
    }
    return subprocess.Popen(
      [sys.executable, *arguments],
      env=environment | dict(variables),
      **defaults | options,
    )
