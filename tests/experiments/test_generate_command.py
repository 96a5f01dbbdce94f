"""What `python -m experiments.generate` writes where."""

import json
import os
import pty
import re

import pytest

import specsample

_PROMPT = 'The rain in Spain'
_NEW_TOKENS = 96  # more than a terminal is wide
# As terminals know them: green, bold red, bold blue.
_COLOURS = {'accepted': '32', 'correction': '1;31', 'bonus': '1;34'}


@pytest.fixture(scope='module')
def call(tiny_methods):
  """The command with its flags, all but the drafter's."""
  return [
    'generate',
    *tiny_methods,
    '--drafter=ngram',
    f'--prompt={_PROMPT}',
    f'--max_new_tokens={_NEW_TOKENS}',
  ]


@pytest.fixture(scope='module')
def outcomes(call, commands, tmp_path_factory):
  """How the command ended by what was added to it, into a pipe."""
  out = tmp_path_factory.mktemp('out')
  added = {
    'ngram': [f'--out={out}/ngram'],
    'skip': ['--drafter=skip', '--show', f'--out={out}/skip'],
    'none': ['--drafter=none', f'--out={out}/none'],
    'no drafts': ['--num_draft_tokens=0', f'--out={out}/no drafts'],
    'chat': ['--chat', '--drafter=none'],
    'drawn': ['--temperature=1', '--drafter=none', '--seed=1'],
    'drawn again': ['--temperature=1', '--drafter=none', '--seed=1'],
    'drawn anew': ['--temperature=1', '--drafter=none', '--seed=2'],
  }
  ended = commands.run_in_forks([[*call, *more] for more in added.values()])
  assert {outcome.code for outcome in ended} == {0}, ended
  return out, dict(zip(added, ended, strict=True))


def _json(outcomes, name):
  folder, _ = outcomes
  return json.loads((folder / name / 'generate.json').read_text())


@pytest.mark.parametrize('name', ['ngram', 'skip', 'none', 'no drafts'])
def test_a_pipe_gets_the_text_alone(outcomes, greedy, name):
  outcome = outcomes[1][name]
  _, text = greedy(_PROMPT, _NEW_TOKENS)
  assert outcome.out == text + '\n'
  assert '\x1b' not in outcome.out + outcome.err
  assert re.search(
    rf'^{_NEW_TOKENS} tokens in \d+ rounds, \d+\.\d\d a round.*\n'
    r'\d+\.\d\d s, \d+\.\d ms a token .*stopped by: max_new_tokens\n\Z',
    outcome.err,
    re.MULTILINE,
  )


def test_a_chat_is_answered(outcomes, greedy):
  _, text = greedy(_PROMPT, _NEW_TOKENS, chat=True)
  assert outcomes[1]['chat'].out == text + '\n'


def test_a_seed_fixes_what_is_drawn(outcomes):
  drawn = outcomes[1]['drawn'].out
  assert outcomes[1]['drawn again'].out == drawn
  assert outcomes[1]['drawn anew'].out != drawn
  assert outcomes[1]['none'].out != drawn


@pytest.mark.parametrize('name', ['ngram', 'skip', 'none', 'no drafts'])
def test_json_holds_the_generation(outcomes, greedy, name):
  result = _json(outcomes, name)
  assert result.keys() == {
    *('schema', 'hardware', 'versions', 'compiler_flags', 'git_commit'),
    *('command', 'gin_config', 'prompt'),
    *('text', 'tokens', 'origins', 'metrics'),
  }
  tokens, text = greedy(_PROMPT, _NEW_TOKENS)
  assert (result['prompt'], result['text']) == (_PROMPT, text)
  assert result['tokens'] == tokens
  metrics = result['metrics']
  assert metrics['tokens'] == len(tokens) == len(result['origins'])
  accepted = result['origins'].count('accepted')
  assert metrics['rounds'] == len(tokens) - accepted
  assert metrics['tokens_per_round'] == len(tokens) / metrics['rounds']
  assert metrics['stop_reason'] == 'max_new_tokens'
  drafts = {'ngram': 4, 'skip': 2}.get(name, 0)
  assert len(metrics['acceptance_by_position']) == drafts
  assert (metrics['plain_rounds'] is None) == (not drafts)
  assert bool(accepted) == bool(drafts)


def test_rounds_go_to_standard_error_beside_a_pipe(outcomes):
  outcome = outcomes[1]['skip']
  legend, *lines = outcome.err.splitlines()
  assert legend == 'round (drafts kept): accepted draft, correction, bonus'
  assert _shown_text(lines) == outcome.out.rstrip('\n').replace('\n', '⏎')
  assert 'accepted draft' not in outcomes[1]['none'].err


def test_a_terminal_gets_the_origins_by_colour(
  outcomes, call, commands, checkpoint
):
  result = _json(outcomes, 'skip')
  assert set(result['origins']) == set(_COLOURS)
  tokenizer = specsample.load(checkpoint).tokenizer
  expected = [
    (_COLOURS[origin], character)
    for token, origin in zip(result['tokens'], result['origins'], strict=True)
    for character in tokenizer.decode([token]).replace('\n', '⏎')
  ]
  screen = _on_terminal(commands, [*call, '--drafter=skip', '--show'])
  legend, *lines = screen.split('\r\n')
  for colour in _COLOURS.values():
    assert f'\x1b[{colour}m' in legend
  coloured = re.findall(r'\x1b\[([1;]*3\d)m([^\x1b]+)', ''.join(lines))
  assert [
    (colour, character) for colour, text in coloured for character in text
  ] == expected
  # A line a round, with the number of drafts that were kept.
  plain = [re.sub(r'\x1b\[[\d;]*m', '', line) for line in lines]
  rounds = [re.match(r' *(\d+) \((\d)\) ', line) for line in plain]
  found = [(int(one[1]), int(one[2])) for one in rounds if one]
  assert [i for i, _ in found] == list(
    range(1, result['metrics']['rounds'] + 1)
  )
  assert sum(kept for _, kept in found) == result['origins'].count('accepted')
  assert 'stopped by: max_new_tokens' in screen


def _shown_text(lines):
  """The text of the rounds among lines without colours."""
  rounds = [re.fullmatch(r' *\d+ \(\d\) (.*)', line) for line in lines]
  return ''.join(found[1] for found in rounds if found)


def _on_terminal(commands, call):
  """All that a command writes to a terminal of its own."""
  terminal, end = pty.openpty()
  process = commands.start(*call, stdin=end, stdout=end, stderr=end)
  os.close(end)
  chunks = []
  try:
    while chunk := os.read(terminal, 1 << 16):
      chunks.append(chunk)
  except OSError:  # Linux's way to say that the other end is closed.
    pass
  finally:
    os.close(terminal)
  assert process.wait() == 0
  return b''.join(chunks).decode()
