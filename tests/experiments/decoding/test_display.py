"""Texts, rounds and metrics of a decode, as a terminal shows them."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest
import rich.console

from experiments import methods
from experiments.decoding import display
from experiments.decoding import rounds
from experiments.decoding import setup as setup_lib
from experiments.decoding import stream
import specsample
from specsample import drafters
from specsample import stats
from specsample import tree
from specsample import verify
from specsample.types import DraftKind, Origin, StopReason

_ROUNDS = (
  ('Hi ', [Origin.PLAIN]),
  ('there\nyou', [Origin.ACCEPTED] * 8 + [Origin.CORRECTION]),
  (' all', [Origin.ACCEPTED] * 3 + [Origin.BONUS]),
)
_MARKED = 'Hi [there\nyo]u[ al]l\n'


@pytest.fixture(scope='module')
def target(checkpoint):
  """The tiny model, with one token per character."""
  return specsample.load(checkpoint)


@pytest.fixture(scope='module')
def tokenizer(target):
  return target.tokenizer


def _chunk(tokens=(), origins=(), counts=(1, 1, (1,), (1,)), **changes):
  values = {'stop_reason': StopReason.RUNNING, 'seconds': 1.0} | changes
  return stream.Chunk(
    tokens=list(tokens),
    origins=[*origins, *origins[-1:] * (len(tokens) - len(origins))],
    stats=stats.Stats(*counts),
    **values,
  )


def _chunks(tokenizer):
  return [_chunk(tokenizer.encode(text), of_text) for text, of_text in _ROUNDS]


@pytest.mark.parametrize(
  ('settings', 'expected', 'legend'),
  [
    # Terminal codes for green, bold red and bold blue.
    (
      {'force_terminal': True, 'color_system': 'standard'},
      'Hi \x1b[32mthere\x1b[0m\n\x1b[32myo\x1b[0m\x1b[1;31mu\x1b[0m'
      '\x1b[32m al\x1b[0m\x1b[1;34ml\x1b[0m\n',
      '\x1b[32maccepted draft\x1b[0m, \x1b[1;31mcorrection\x1b[0m, '
      '\x1b[1;34mbonus\x1b[0m, plain (the round drafted nothing)\n',
    ),
    *(
      (
        settings | {'color_system': None},
        _MARKED,
        '[accepted draft], unmarked: correction, bonus or plain (the round '
        'drafted nothing)\n',
      )
      for settings in ({'force_terminal': True, 'no_color': True}, {})
    ),
  ],
)
def test_origins_are_colours_or_brackets(tokenizer, settings, expected, legend):
  console = rich.console.Console(file=io.StringIO(), width=100, **settings)
  view = display.OriginView(tokenizer, console)
  assert console.file.getvalue() == legend
  for one in _chunks(tokenizer):
    view.show(one)
  view.close()
  assert console.file.getvalue() == legend + expected


@pytest.mark.parametrize('is_one_file', [True, False])
def test_one_file_for_both_streams_has_each_token_once(
  tokenizer, tmp_path, monkeypatch, is_one_file
):
  out, err = tmp_path / 'out', tmp_path / ('out' if is_one_file else 'err')
  with out.open('w') as stdout, err.open('a') as stderr:
    monkeypatch.setattr('sys.stdout', stdout)
    monkeypatch.setattr('sys.stderr', stderr)
    for view in display.views(tokenizer, display.OriginView):
      for one in _chunks(tokenizer):
        view.show(one)
      view.close()
  legend, shown = err.read_text().split('\n', maxsplit=1)
  assert legend.startswith('[accepted draft], unmarked: ')
  assert shown == _MARKED
  text = f'{legend}\n{_MARKED}' if is_one_file else 'Hi there\nyou all\n'
  assert out.read_text() == text


def test_interrupted_generation_has_its_text_and_metrics(tokenizer, capsys):
  def rounds():
    yield from _chunks(tokenizer)[:2]
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
  last = _chunk(
    counts=(128, 109, proposed, accepted),
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
  counts = (tokens, 1, (1,), (1,))
  display.say_if_empty([_chunk(counts=counts, stop_reason=reason)])
  assert ('ask it with --chat' in capsys.readouterr().err) == is_said


_PROMPTS = ('The rain in Spain', 'Hello')
_WARM = specsample.Sampling(temperature=1.5)
_CASES = ('chain', 'block', 'coupled', 'candidates', 'drawn tree', 'ngram')


def _decode(setup, prompts):
  """Decodes prompts; returns the output and the rounds of each row."""
  state = setup.prefill(prompts)
  rows: list[list[rounds.Round]] = [[] for _ in prompts]
  done = False
  while not done:
    found, state = rounds.step(setup, state)
    for i, row in enumerate(rows):
      row += rounds.of_row(setup, found, i)
    done = bool(np.all(state.done))
  return setup.finish(state, len(prompts)), rows


def _method(target, case):
  skip = drafters.Skip(model=target.model, layers=(0,), num_draft_tokens=2)
  drawn = drafters.Tree(
    drafter=skip,
    topology=tree.k_ary((2, 2)),
    kind=DraftKind.WITHOUT_REPLACEMENT,
  )
  return {
    'chain': lambda: methods.Method(skip),
    'block': lambda: methods.Method(skip, verify.block),
    'coupled': lambda: methods.Method(skip, verify.coupled),
    'candidates': lambda: methods.candidates(methods.Method(skip), 3),
    'drawn tree': lambda: methods.Method(drawn, verify.tree),
    'ngram': lambda: methods.Method(drafters.Ngram(num_draft_tokens=3)),
  }[case]()


@pytest.fixture(scope='module')
def decoded(target):
  """A function that returns a case's setup, output, and rounds of each row."""
  found = {}

  def of(case):
    if case not in found:
      setup = setup_lib.Setup(
        target=target,
        method=_method(target, case),
        sampling=specsample.Sampling() if case == 'ngram' else _WARM,
        max_new_tokens=24,
        seed=3,
      )
      prompts = [target.tokenizer.encode(text) for text in _PROMPTS]
      found[case] = setup, prompts, *_decode(setup, prompts)
    return found[case]

  return of


@pytest.mark.slow
@pytest.mark.parametrize('case', _CASES)
def test_decode_is_the_same(decoded, target, case):
  setup, prompts, output, rows = decoded(case)
  expected = setup.generate(prompts)
  np.testing.assert_array_equal(output.tokens, expected.tokens)
  np.testing.assert_array_equal(output.origin, expected.origin)
  for i, row in enumerate(rows):
    length = int(expected.lengths[i])
    text = ''.join(
      ''.join(x.text for x in one.candidates if x.fate == rounds.KEPT)
      + ('' if one.next is None else one.next.text)
      for one in row
    )
    ids = expected.tokens[i, :length].tolist()
    assert text == target.tokenizer.decode(ids)
    assert [one.number for one in row] == list(range(1, len(row) + 1))


def test_probabilities_are_those_of_a_pass_of_the_target(decoded, target):
  _, prompts, output, rows = decoded('chain')
  written = prompts[0]
  text = lambda i: target.tokenizer.decode([i], skip_special=False)
  empty = target.model.init_cache(1, 0)
  logits = jax.jit(
    lambda x: target.model.apply(target.params, x, empty)[0].logits
  )
  ids = {text(i): i for i in range(target.model.vocab_size)}
  for one in rows[0]:
    drafted = [ids[x.text] for x in one.candidates]
    tokens = np.zeros((1, 64), np.int32)  # no token attends to what follows
    tokens[0, : len(written) + len(drafted)] = [*written, *drafted]
    probs = jax.nn.softmax(logits(tokens)[0] / _WARM.temperature)
    for i, (x, token) in enumerate(zip(one.candidates, drafted, strict=True)):
      expected = float(probs[len(written) - 1 + i, token])
      assert x.target_prob == pytest.approx(expected, abs=1e-5)
    kept = sum(x.fate == rounds.KEPT for x in one.candidates)
    count = len(written) - len(prompts[0]) + kept + (one.next is not None)
    written = [*prompts[0], *output.tokens[0, :count].tolist()]


def test_token_rule_accepts_by_the_ratio(decoded):
  *_, rows = decoded('chain')
  every = [x for row in rows for one in row for x in one.candidates]
  tried = [x for x in every if x.fate in (rounds.KEPT, rounds.REJECTED)]
  for x in tried:
    ratio = min(1, x.target_prob / x.draft_prob)
    assert x.keep_prob == pytest.approx(ratio, abs=1e-5)
  assert {x.fate for x in tried} == {rounds.KEPT, rounds.REJECTED}


def test_each_candidate_is_tried_with_what_is_left(decoded):
  *_, rows = decoded('candidates')
  for one in (one for row in rows for one in row):
    left: dict[int, float] = {}
    for x in one.candidates:
      share = x.target_prob / left.setdefault(x.parent, 1.0)
      if x.keep_prob is not None:
        assert x.keep_prob == pytest.approx(share, abs=1e-4)
      left[x.parent] -= x.target_prob
      assert x.draft_prob is None
      assert 0 < x.confidence < 1


@pytest.mark.parametrize('case', ['chain', 'candidates', 'drawn tree'])
def test_fate_follows_from_the_fates_before(decoded, case):
  *_, rows = decoded(case)
  seen = set()
  for one in (one for row in rows for one in row):
    fates = {0: rounds.KEPT}
    siblings: dict[int, list[str]] = {}
    for x in one.candidates:
      earlier = siblings.setdefault(x.parent, [])
      if fates[x.parent] != rounds.KEPT:
        assert x.fate == rounds.FALLS
      elif rounds.KEPT in earlier:
        assert x.fate == rounds.NOT_TRIED
      else:
        assert x.fate in (rounds.KEPT, rounds.REJECTED)
      fates[x.node] = x.fate
      earlier.append(x.fate)
      seen.add(x.fate)
  expected = {rounds.KEPT, rounds.REJECTED, rounds.FALLS}
  assert seen == expected | ({rounds.NOT_TRIED} if case != 'chain' else set())


@pytest.mark.parametrize(
  ('case', 'correction'),
  [
    ('chain', '(target - draft)+, normalised, after '),
    ('drawn tree', '(target - draft)+, normalised, after '),
    ('block', 'what verify.block leaves of the target after '),
    ('coupled', 'with the noise shared with the drafter'),
    ('ngram', 'the most likely token of the target after '),
  ],
)
def test_next_token_says_where_it_is_from(decoded, case, correction):
  *_, rows = decoded(case)
  last = [one.next for row in rows for one in row if one.next is not None]
  corrections = [x for x in last if x.origin == 'correction']
  assert corrections
  for x in corrections:
    assert correction in x.source
  assert {x.prob is None for x in last} == {case == 'ngram'}
  if case == 'chain':
    bonus = [x.source for x in last if x.origin == 'bonus']
    assert set(bonus) == {'the target after 2, where the draft ends'}


@pytest.mark.slow
def test_nothing_is_rejected_past_the_end(decoded):
  setup, prompts, *_ = decoded('chain')
  setup = dataclasses.replace(setup, max_new_tokens=96)
  output = setup.generate(prompts[:1])
  tokens = output.tokens[0].tolist()
  is_kept = (output.origin[0] == specsample.Origin.ACCEPTED).tolist()
  # A stop at a kept draft token that another one follows.
  eos = next(
    tokens[i]
    for i in range(len(tokens) - 1)
    if is_kept[i] and is_kept[i + 1] and tokens[i] not in tokens[:i]
  )
  setup = dataclasses.replace(setup, stop=specsample.Stop(eos_ids=(eos,)))
  _, (row,) = _decode(setup, prompts[:1])
  fates = [x.fate for x in row[-1].candidates]
  kept = fates.count(rounds.KEPT)
  after = [rounds.PAST_THE_END] * (len(fates) - kept)
  assert kept and after
  assert fates == [rounds.KEPT] * kept + after
  assert row[-1].next is None


_ROUND = rounds.Round(
  number=7,
  candidates=(
    rounds.Candidate(
      node=1,
      parent=0,
      text=' the',
      draft_prob=0.9,
      confidence=0.7,
      target_prob=0.8,
      keep_prob=8 / 9,
      fate=rounds.KEPT,
    ),
    rounds.Candidate(
      node=2,
      parent=1,
      text=' cat\n',
      draft_prob=None,
      confidence=0.8,
      target_prob=1e-5,
      keep_prob=0.375,
      fate=rounds.REJECTED,
    ),
  ),
  next=rounds.Next(
    text=' dog', origin='correction', prob=0.25, source='the residual after 1'
  ),
)


def _printed(tokenizer, **settings):
  console = rich.console.Console(file=io.StringIO(), width=100, **settings)
  view = display.RoundView(tokenizer, console)
  view.show(_chunk(tokenizer.encode('the text'), rounds=[_ROUND]))
  view.close()
  return console.file.getvalue().removeprefix(f'{rounds.LEGEND}\n')


def test_pipe_gets_marks_and_the_text(tokenizer):
  assert _printed(tokenizer) == (
    '\n'
    'round 7          drafter   target     keep\n'
    "  1                0.900    0.800    0.889  kept       ' the'\n"
    "  2              (0.800)    1e-05    0.375  rejected   ~~' cat\\n'~~\n"
    "  + ' dog'  correction, drawn with probability 0.250 from the residual "
    'after 1\n'
    '\nthe text\n'
  )


def test_terminal_strikes_through_what_is_rejected(tokenizer):
  shown = _printed(tokenizer, force_terminal=True, color_system='standard')
  assert "\x1b[9;31m' cat\\n'\x1b[0m" in shown
  assert "\x1b[32m' the'\x1b[0m" in shown
  assert '~~' not in shown


def test_rounds_are_read_back_from_json():
  text = json.dumps(dataclasses.asdict(_ROUND))
  assert rounds.from_json(json.loads(text)) == _ROUND
