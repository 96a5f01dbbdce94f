"""The output and files of `python -m experiments.generate`."""

import json
import os
import pty
import re
import subprocess
import sys

import gin
import pytest

_PROMPT = 'The rain in Spain'
_NEW_TOKENS = 96  # more than a terminal is wide
# Terminal codes for green, bold red and bold blue.
_COLOURS = {'accepted': '32', 'correction': '1;31', 'bonus': '1;34'}
_DRAWN = """
from __gin__ import dynamic_registration
from experiments.decoding import generating
import specsample
generating.Generator.sampling = @specsample.Sampling()
specsample.Sampling.temperature = 1.0
"""
_GREEDY = ('ngram', 'skip', 'candidates', 'none', 'no drafts')


@pytest.fixture(scope='module')
def call(tiny_methods):
  """The command with its flags; the drafter is n-gram lookup."""
  return [
    'generate',
    *tiny_methods,
    '--drafter=ngram',
    f'--prompt={_PROMPT}',
    f'--max_new_tokens={_NEW_TOKENS}',
  ]


@pytest.fixture(scope='module')
def outcomes(call, commands, tmp_path_factory):
  """Outcomes of the command by case, with its output going to a pipe."""
  out = tmp_path_factory.mktemp('out')
  added = {
    'ngram': [f'--out={out}/ngram'],
    'skip': ['--drafter=skip', '--show', f'--out={out}/skip'],
    'candidates': [
      *('--drafter=skip', '--top_candidates=3', f'--out={out}/candidates')
    ],
    'none': ['--drafter=none', f'--out={out}/none'],
    'no drafts': ['--num_draft_tokens=0', f'--out={out}/no drafts'],
    'chat': ['--chat', '--drafter=none'],
    'drawn': ['--temperature=1', '--drafter=none', '--seed=1'],
    'drawn in rounds': [
      *('--temperature=1', '--drafter=skip', '--seed=1', '--show_drafts'),
      f'--out={out}/drawn in rounds',
    ],
    'drawn without': ['--temperature=1', '--drafter=skip', '--seed=1'],
    'drawn again': ['--temperature=1', '--drafter=none', '--seed=1'],
    'drawn anew': ['--temperature=1', '--drafter=none', '--seed=2'],
    'best of all': ['--temperature=1', '--drafter=none', '--top_k=1'],
    'of all mass': ['--temperature=1', '--drafter=none', '--top_p=1e-6'],
    'near the best': ['--temperature=1', '--drafter=none', '--min_p=1'],
    'configured': [
      *('--drafter=none', '--seed=1'),
      '--gin_file=configs/runs/generate.gin',
      f'--gin_file={out / "drawn.gin"}',
    ],
  }
  (out / 'drawn.gin').write_text(_DRAWN)
  ended = commands.run_all([[*call, *more] for more in added.values()])
  assert {outcome.code for outcome in ended} == {0}, ended
  return out, dict(zip(added, ended, strict=True))


def _json(outcomes, name):
  folder, _ = outcomes
  return json.loads((folder / name / 'generate.json').read_text())


@pytest.mark.parametrize('name', _GREEDY)
def test_a_pipe_gets_the_text_alone(outcomes, greedy, name):
  outcome = outcomes[1][name]
  _, text = greedy(_PROMPT, _NEW_TOKENS)
  assert outcome.out == text + '\n'
  assert '\x1b' not in outcome.out + outcome.err
  assert re.search(
    rf'^{_NEW_TOKENS} tokens in \d+ rounds \(\d+\.\d\d per round\)[:,] .*\n'
    r'first token after \d+\.\d\d s, then \d+\.\d tokens per second '
    r'\(\d+\.\d ms per token\)\n'
    r'stopped by: max_new_tokens; before the prompt: importing \d+\.\d s, '
    r'loading \d+\.\d s, compiling \d+\.\d s\n\Z',
    outcome.err,
    re.MULTILINE,
  )


def test_more_candidates_keep_more(outcomes):
  kept = {
    name: _json(outcomes, name)['metrics']['kept']
    for name in ('skip', 'candidates')
  }
  assert kept['candidates'] > kept['skip']


def test_standard_error_says_what_is_under_way(outcomes, checkpoint):
  first, second, third, *rest = outcomes[1]['none'].err.splitlines()
  assert first == 'importing JAX ...'
  assert second == f'loading {checkpoint} ...'
  assert third == 'compiling the decoding loop ...'
  assert not any(line.endswith(' ...') for line in rest)


def test_a_chat_is_answered(outcomes, greedy):
  _, text = greedy(_PROMPT, _NEW_TOKENS, chat=True)
  assert outcomes[1]['chat'].out == text + '\n'


def test_settings_and_the_seed_decide_what_is_drawn(outcomes):
  out = {name: outcome.out for name, outcome in outcomes[1].items()}
  for name in ('drawn again', 'configured'):
    assert out[name] == out['drawn']
  for name in ('drawn anew', 'none'):
    assert out[name] != out['drawn']
  # Of one likely token, sampling is greedy.
  for name in ('best of all', 'of all mass', 'near the best'):
    assert out[name] == out['none']


@pytest.mark.parametrize('name', _GREEDY)
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
  assert metrics['kept'] == accepted <= metrics['drafted']
  assert metrics['time_to_first_token'] > 0
  assert metrics['tokens_per_second'] == len(tokens) / metrics['seconds']
  drafts = {'ngram': 4, 'skip': 2, 'candidates': 2}.get(name, 0)
  assert len(metrics['acceptance_by_position']) == drafts
  assert (metrics['plain_rounds'] is None) == (not drafts)
  assert bool(accepted) == bool(drafts)


def test_showing_the_drafts_changes_no_token(outcomes):
  shown = outcomes[1]['drawn in rounds']
  assert shown.out == outcomes[1]['drawn without'].out
  assert re.search(r'^round 1 +drafter +target +keep$', shown.err, re.M)
  assert re.search(r'^  1 .* rejected   ~~.+~~$', shown.err, re.M)
  assert 'from (target - draft)+, normalised, after 1' in shown.err


def test_json_and_the_page_of_results_hold_the_rounds_that_are_shown(
  outcomes, commands, tmp_path
):
  result = _json(outcomes, 'drawn in rounds')
  metrics, rounds = result['metrics'], result['rounds']
  assert len(rounds) == metrics['rounds']
  drafted = [x for one in rounds for x in one['candidates']]
  assert len(drafted) == metrics['drafted']
  fates = [x['fate'] for x in drafted]
  assert fates.count('kept') == metrics['kept']
  page = tmp_path / 'page.html'
  results = outcomes[0] / 'drawn in rounds'
  commands.complete('report', f'--results={results}', f'--out={page}')
  text = page.read_text('utf-8')
  assert text.count('>round ') == len(rounds)
  struck = fates.count('rejected') + fates.count('falls')
  assert text.count('<del>') == struck > 0


def test_marked_text_goes_to_standard_error_beside_a_pipe(outcomes):
  outcome = outcomes[1]['skip']
  legend, *rest = outcome.remarks
  assert legend.startswith('[accepted draft], unmarked: correction, bonus or')
  marked = '\n'.join(rest).partition('\n\n')[0]
  text = outcome.out.rstrip('\n')
  assert marked.count('[') > text.count('[')
  bare = lambda text: re.sub(r'[\[\]\s]', '', text)
  assert bare(marked).startswith(bare(text))
  assert 'accepted draft' not in outcomes[1]['none'].err


@pytest.mark.slow
def test_a_terminal_gets_the_origins_by_colour(outcomes, call, commands):
  text = outcomes[1]['skip'].out
  screen = _on_terminal(commands, [*call, '--drafter=skip', '--show'])
  for colour in _COLOURS.values():
    assert screen.count(f'\x1b[{colour}m') > 1  # in the legend and after it
  plain = re.sub(r'\x1b\[[\d;?]*[a-zA-Z]', '', screen)
  bare = lambda text: re.sub(r'\s', '', text)
  assert bare(text) in bare(plain)
  assert 'stopped by: max_new_tokens' in plain


@pytest.mark.slow
def test_a_second_turn_is_answered_with_the_first_in_mind(
  tiny_methods, commands, greedy, target
):
  call = ('generate', *tiny_methods, '--interactive', '--max_new_tokens=24')
  process = commands.start(*call, '--drafter=skip', stdin=subprocess.PIPE)
  outcome = commands.finish(process, b'Hello!\nAnd then?\n')
  tokens, answer = greedy('Hello!', 24, chat=True)
  whole = target.tokenizer.encode('user: Hello!\nassistant: ') + tokens
  new = target.tokenizer.encode('\nuser: And then?\nassistant: ')
  _, other = greedy(whole + new, 24)
  assert outcome.code == 0, outcome.err
  assert outcome.out == f'{answer}\n{other}\n'
  read = re.findall(r'^\((\d+) tokens read, 24 written', outcome.err, re.M)
  assert read == [str(len(whole) - 24), str(len(new))]


def test_help_names_the_shipped_drafters(commands):
  text = commands.run('generate', '--help').out
  (names,) = re.findall(r'The drafter:\s+([^.]*)\.', text)
  gin.clear_config()
  gin.add_config_file_search_path(os.getcwd())
  gin.parse_config_file('configs/runs/generate.gin')
  shipped = gin.query_parameter('generating.Generator.methods')
  gin.clear_config()
  assert names.replace(',', ' ').split() == list(shipped)


@pytest.mark.slow
def test_flags_are_parsed_before_jax_is_imported():
  code = (
    'import sys; from experiments import generate; early = set(sys.modules); '
    'from experiments.decoding import generating; late = set(sys.modules); '
    'print(*sorted(early & {"jax", "rich"}), "jax" in late, '
    '"matplotlib" in late)'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert done.stdout == 'True False\n'


def _on_terminal(commands, call):
  """Returns everything that a command writes to a terminal of its own."""
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
