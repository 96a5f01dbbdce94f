"""A generation's text, coloured by origin in a terminal, and its metrics."""

import io

import pytest
import rich.console

from experiments.decoding import display
from experiments.decoding import stream
import specsample
from specsample import stats
from specsample.types import Origin, StopReason

_ROUNDS = (
  ('Hi ', [Origin.PLAIN]),
  ('there\nyou', [Origin.ACCEPTED] * 8 + [Origin.CORRECTION]),
  (' all', [Origin.ACCEPTED] * 3 + [Origin.BONUS]),
)
# Terminal codes for green, bold red and bold blue.
_COLOURED = (
  'Hi \x1b[32mthere\x1b[0m\n\x1b[32myo\x1b[0m\x1b[1;31mu\x1b[0m'
  '\x1b[32m al\x1b[0m\x1b[1;34ml\x1b[0m\n'
)


@pytest.fixture(scope='module')
def tokenizer(checkpoint):
  """A tokenizer with one token per character."""
  return specsample.load(checkpoint).tokenizer


def _chunk(tokenizer, text, origins):
  tokens = tokenizer.encode(text)
  return stream.Chunk(
    tokens=tokens,
    origins=[*origins, *origins[-1:] * (len(tokens) - len(origins))],
    stats=stats.Stats(len(tokens), 1, (1,), (1,)),
    stop_reason=StopReason.RUNNING,
    seconds=1.0,
  )


def _shown(tokenizer, rounds, **settings):
  """Returns what a console prints for the legend and for the rounds."""
  settings = {'width': 40, 'color_system': 'standard'} | settings
  console = rich.console.Console(file=io.StringIO(), **settings)
  view = display.OriginView(tokenizer, console)
  legend = console.file.getvalue()
  for one in rounds:
    view.show(_chunk(tokenizer, *one))
  view.close()
  return legend, console.file.getvalue().removeprefix(legend)


def test_colours_are_in_the_running_text(tokenizer):
  legend, text = _shown(tokenizer, _ROUNDS, force_terminal=True, width=80)
  assert text == _COLOURED
  assert legend == (
    '\x1b[32maccepted draft\x1b[0m, \x1b[1;31mcorrection\x1b[0m, '
    '\x1b[1;34mbonus\x1b[0m, plain (the round drafted nothing)\n'
  )


@pytest.mark.parametrize(
  'settings', [{'force_terminal': True, 'no_color': True}, {}]
)
def test_without_colours_accepted_drafts_have_brackets(tokenizer, settings):
  legend, text = _shown(
    tokenizer, _ROUNDS, **{'color_system': None, 'width': 100} | settings
  )
  assert text == 'Hi [there\nyo]u[ al]l\n'
  assert legend == (
    '[accepted draft], unmarked: correction, bonus or plain (the round drafted '
    'nothing)\n'
  )


@pytest.mark.parametrize('is_one_file', [True, False])
def test_one_file_for_both_streams_has_each_token_once(
  tokenizer, tmp_path, monkeypatch, is_one_file
):
  marked, text = 'Hi [there\nyo]u[ al]l\n', 'Hi there\nyou all\n'
  out, err = tmp_path / 'out', tmp_path / ('out' if is_one_file else 'err')
  with out.open('w') as stdout, err.open('a') as stderr:
    monkeypatch.setattr('sys.stdout', stdout)
    monkeypatch.setattr('sys.stderr', stderr)
    for view in display.views(tokenizer, display.OriginView):
      for one in _ROUNDS:
        view.show(_chunk(tokenizer, *one))
      view.close()
  legend, shown = err.read_text().split('\n', maxsplit=1)
  assert legend.startswith('[accepted draft], unmarked: ')
  assert shown == marked
  assert out.read_text() == (f'{legend}\n{marked}' if is_one_file else text)


def test_an_interrupted_generation_has_its_text_and_metrics(tokenizer, capsys):
  def rounds():
    for one in _ROUNDS[:2]:
      yield _chunk(tokenizer, *one)
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    display.show(rounds(), display.views(tokenizer, None), display.metrics_text)
  out, err = capsys.readouterr()
  assert out == 'Hi there\nyou\n'
  assert err.endswith('stopped by: interruption\n')


@pytest.mark.parametrize(
  ('proposed', 'accepted', 'expected'),
  [
    (
      (87, 2, 20),
      (90, 19, 0),
      '128 tokens in 109 rounds (1.17 per round): 42 drafted in 22 rounds, '
      '19 kept; 87 rounds drafted nothing',
    ),
    ((108, 0, 1), (108, 0, 1), ': 2 drafted in 1 round, 2 kept; 108 rounds'),
    ((0, 109), (100, 9), '109 drafted in 109 rounds, 9 kept\n'),
    ((109, 0), (109, 0), ': no round drafted anything\n'),
    ((109,), (109,), '(1.17 per round), without drafts\n'),
  ],
)
def test_counts_of_drafts_fit_together(proposed, accepted, expected):
  last = stream.Chunk(
    tokens=[],
    origins=[],
    stats=stats.Stats(128, 109, proposed, accepted),
    stop_reason=StopReason.EOS,
    seconds=4.0,
    first_seconds=1.9,
  )
  counts, times, reason = display.metrics_text(last).splitlines()
  assert expected in counts + '\n'
  assert times == (
    'first token after 1.90 s, then 32.0 tokens per second (31.2 ms per token)'
  )
  assert reason == 'stopped by: eos'


@pytest.mark.parametrize(
  ('tokens', 'reason', 'is_said'),
  [
    (1, StopReason.EOS, True),
    (2, StopReason.EOS, False),
    (1, StopReason.MAX_NEW_TOKENS, False),
  ],
)
def test_of_a_text_that_ended_at_once_it_says_what_helps(
  capsys, tokens, reason, is_said
):
  last = stream.Chunk(
    tokens=[],
    origins=[],
    stats=stats.Stats(tokens, 1, (1,), (1,)),
    stop_reason=reason,
    seconds=1.0,
  )
  display.say_if_empty([last])
  assert ('ask it with --chat' in capsys.readouterr().err) == is_said
