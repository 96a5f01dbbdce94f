"""Conversations: a later turn has the method's own answers in its context."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.command import progress
from experiments.command import units
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import audits
from experiments.evaluation import conversations
from experiments.evaluation import decoding
from experiments.evaluation import evaluation
from experiments.evaluation import generations
from experiments.evaluation import table as table_lib
from experiments.reporting import ratios
from experiments.reporting import rows
import specsample
from specsample import testing
from specsample.testing import hash_model
from tests.experiments.evaluation import made_up

_PROMPTS = [
  prompts_lib.Prompt('81', 'math', 'One?', 1, next_turns=('And?', 'So?')),
  prompts_lib.Prompt('401', 'qa', 'Two?', 2),
  prompts_lib.Prompt('82', 'math', 'Three?', 3, next_turns=('Then?',)),
]
_NEW_TOKENS = 8
_NGRAM = specsample.drafters.Ngram(num_draft_tokens=2)


@pytest.fixture(scope='module')
def compared(checkpoint):
  """A baseline, an exact and a lossy method of a hash model that draws."""
  tokenizer = specsample.load(checkpoint).tokenizer
  size = len(tokenizer.backend.get_vocab())
  model = hash_model.HashModel(vocab_size=size, max_length=256)
  return evaluation.Evaluation(
    target=specsample.Loaded(model, {}, tokenizer),
    methods={
      methods.BASELINE: methods.Method(specsample.drafters.NoDraft()),
      'ngram': methods.Method(_NGRAM),
      'lossy': methods.Method(_NGRAM, specsample.verify.Synthetic(rate=1.0)),
    },
    max_new_tokens=_NEW_TOKENS,
    batch_size=2,
    least_width=128,  # all turns run the same programs
    repeats=0,
  )


@pytest.fixture(scope='module')
def decoded(compared, tmp_path_factory):
  """The journal of all turns, and the turns."""
  journal = journal_lib.Journal(tmp_path_factory.mktemp('journal'), {})
  return journal, _decode(compared, journal)


def _part(compared, journal, prompts=_PROMPTS):
  return evaluation.Part(
    evaluation=compared,
    tokens=[compared.encode('', prompt) for prompt in prompts],
    prompts=prompts,
    journal=journal,
    benchmark='asked',
  )


def _decode(compared, journal):
  turns, part = [], _part(compared, journal)
  for number in conversations.numbers(compared, _PROMPTS):
    turns.append(conversations.turn(part, number))
    work = [
      unit
      for unit in decoding.units(part, turns[-1], {})
      if unit.key[0] != decoding.MEMORY
    ]
    units.run(work, journal, progress.bar)
  return turns


def _answers(journal, method):
  """Returns the tokens of a method's answers, by prompt and turn."""
  return {
    (run['prompt'], run['turn']): run['tokens']
    for unit in journal.of('generation', method)
    for run in unit['generations']
  }


@pytest.fixture(scope='module')
def table(compared, decoded):
  """The table of all turns."""
  journal, _ = decoded
  journal.add((decoding.MEMORY, 0), {'bytes_per_second': 1.0})
  return table_lib.Table.of(_part(compared, journal))


@pytest.mark.slow(but=('ngram',))
@pytest.mark.parametrize('method', ['ngram', 'lossy'])
def test_context_has_the_methods_own_answers(compared, decoded, method):
  journal, (_, second, third) = decoded
  tokenizer = compared.target.tokenizer
  answers = _answers(journal, method)
  said = lambda *key: tokenizer.decode(answers[key])
  text = f'user: One?\nassistant: {said(0, 0)}\nuser: And?\nassistant: '
  assert second.tokens[method, 0][0] == tokenizer.encode(text)
  text += f'{said(0, 1)}\nuser: So?\nassistant: '
  assert third.tokens[method, 0] == [tokenizer.encode(text)]
  # A prompt that goes on is in the next turn, and is answered there.
  assert list(second.prompts) == [0, 2] and list(third.prompts) == [0]
  assert answers.keys() == {(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)}
  # In the first turn, these prompts are in two batches of two.
  (batch,) = journal.of('generation', method, 0, 1)
  assert [run['prompt'] for run in batch['generations']] == [0, 2]
  sizes = [run['prompt_tokens'] for run in batch['generations']]
  assert sizes == [len(row) for row in second.tokens[method, 0]]


def test_exact_methods_answer_all_turns_alike(compared, decoded, table):
  journal, turns = decoded
  plain = _answers(journal, methods.BASELINE)
  assert _answers(journal, 'ngram') == plain
  assert _answers(journal, 'lossy') != plain
  assert table.mismatches == {'ngram': rows.Mismatches(0, 0)}
  assert not list(audits.units(_part(compared, journal), turns))


def test_row_counts_all_turns_and_each_turn_has_rows(table):
  found = {row.category: row for row in table.rows if row.method == 'ngram'}
  assert {name: (row.prompts, row.tokens) for name, row in found.items()} == {
    'overall': (3, 48),
    'math': (2, 40),
    'qa': (1, 8),
    'turn 1': (3, 24),
    'turn 2': (2, 16),
    'turn 3': (1, 8),
  }
  # A batch holds one turn, so each turn has its own time.
  each = [found[f'turn {i}'] for i in (1, 2, 3)]
  assert all(row.ms_per_token > 0 for row in each)
  total = sum(row.tokens * row.ms_per_token for row in each)
  assert found['overall'].ms_per_token == pytest.approx(total / 48)


def test_question_is_as_fast_as_all_its_turns():
  run = lambda prompt, turn, tokens, seconds: made_up.generation(
    tokens, batch=prompt, prompt=prompt, turn=turn, seconds=seconds
  )
  plain = [run(0, 0, 1, 1.0), run(1, 0, 2, 2.0), run(0, 1, 1, 1.0)]
  fast = [run(0, 0, 1, 1.0), run(1, 0, 2, 1.0), run(0, 1, 3, 1.0)]
  measured = ratios.row_fields(fast, plain)
  # 4 tokens in 2 s and 2 in 1 s, over 1 a second each; turns alone give 3.
  assert measured['mean_speedup'] == pytest.approx(2)
  assert measured['prompts'] == 2


def test_text_of_each_turn_is_a_line(compared, decoded, table, tmp_path):
  tokenizer = compared.target.tokenizer
  generations.write(tmp_path, tokenizer, _PROMPTS, table.generations)
  lines = generations.read(tmp_path / 'generations.jsonl', 9)
  assert [(one['id'], one['text']) for one in lines] == [
    ('81', 'One?'),
    ('81, turn 2', 'And?'),
    ('81, turn 3', 'So?'),
    ('401', 'Two?'),
    ('82', 'Three?'),
    ('82, turn 2', 'Then?'),
  ]
  text = ''.join(lines[-1]['methods']['ngram']['pieces'])
  assert text == tokenizer.decode(_answers(decoded[0], 'ngram')[2, 1])


@pytest.mark.slow
def test_later_turn_is_audited_where_both_read_the_same(compared, tmp_path):
  model = testing.tiny_llama(vocab_size=110)
  params = model.init(jax.random.key(0))
  greedy = dataclasses.replace(
    compared,
    target=dataclasses.replace(compared.target, model=model, params=params),
    methods={x: compared.methods[x] for x in (methods.BASELINE, 'ngram')},
    batch_size=1,
  )
  journal = journal_lib.Journal(tmp_path, {})
  asked = [
    dataclasses.replace(_PROMPTS[0], next_turns=('And?',)),
    _PROMPTS[2],
  ]
  answers = {
    # The first answers differ in prompt 2, and the second ones in both.
    methods.BASELINE: [[[5, 6], [5, 6]], [[7, 8], [7, 8]]],
    'ngram': [[[5, 6], [5, 9]], [[7, 9], [7, 9]]],
  }
  for name, of_turns in answers.items():
    for turn, of_prompts in enumerate(of_turns):
      for i, tokens in enumerate(of_prompts):
        run = made_up.generation(tokens, batch=i, prompt=i, turn=turn)
        key = conversations.key(name, i, turn)
        journal.add(key, {'generations': [run.to_json()]})
  part = _part(greedy, journal, asked)
  turns = [conversations.turn(part, number) for number in range(2)]
  first, second = audits.units(part, turns)
  assert first.key == (audits.KIND, 'ngram', 1)
  assert second.key == (audits.KIND, 'ngram', 0, 1)
  found = second.run()
  assert (found['prompt'], found['turn'], found['position']) == (1, 2, 1)
  # The audit reads what the turn has read: it finds the model's best token.
  read = np.asarray([[*turns[1].tokens['ngram', 0][0], 7]])
  output, _ = model.apply(params, read, model.init_cache(1, 0))
  best = int(np.argmax(np.asarray(output.logits[0, -1])))
  assert found['audit']['float32']['best'] == best
  assert 'prompt 1, turn 2, token 1' in audits.lines([found])[0]


def test_long_answers_lose_their_ends(compared):
  tokenizer = compared.target.tokenizer
  room = compared.target.model.max_length
  long, short = tokenizer.encode('a' * 300), tokenizer.encode('b' * 20)
  tokens = conversations.encode(compared, _PROMPTS[0], [long, short])
  assert len(tokens) == room - 1
  text = tokenizer.decode(tokens)
  assert f'{"b" * 20}\nuser: So?\nassistant: ' in text
  assert 'user: One?\nassistant: aaa' in text


def test_only_as_many_turns_as_asked_for(compared):
  limited = dataclasses.replace(compared, max_turns=2)
  assert list(conversations.numbers(limited, _PROMPTS)) == [0, 1]
  assert list(conversations.numbers(compared, _PROMPTS[1:2])) == [0]
  with pytest.raises(ValueError, match='max_turns is 0: give an integer'):
    dataclasses.replace(compared, max_turns=0)


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    ({'chat': False}, 'chat is False: .* Evaluation'),
    ({'refill': True}, 'Evaluation.refill is .*'),
    ({'answer_limits': (3, 8)}, 'Evaluation.answer_limits is .*'),
  ],
)
def test_several_turns_are_refused_where_one_is_decoded(
  compared, settings, words
):
  changed = dataclasses.replace(compared, **settings)
  message = rf'asked, line 1: 3 turns .*{words}.max_turns = 1'
  with pytest.raises(ValueError, match=message):
    conversations.check(changed, 'asked', _PROMPTS[0])
  first_only = dataclasses.replace(changed, max_turns=1)
  conversations.check(first_only, 'asked', _PROMPTS[0])


def test_turns_that_are_longer_than_the_cache_are_refused(compared):
  long = dataclasses.replace(_PROMPTS[2], next_turns=('x' * 300,))
  message = 'asked, line 3: 2 turns of the user have 3.* takes 256, .* shorten'
  with pytest.raises(ValueError, match=message):
    conversations.check(compared, 'asked', long)
  conversations.check(dataclasses.replace(compared, max_turns=1), 'asked', long)


def test_kill_in_the_second_turn_loses_nothing(
  commands, tiny_evaluate, tmp_path
):
  asked = [
    {'question_id': i, 'category': 'qa', 'turns': ['Why?' * i, 'Why not?']}
    for i in range(1, 7)
  ]
  text = ''.join(json.dumps(one) + '\n' for one in asked)
  (tmp_path / 'asked.jsonl').write_text(text)
  call = [
    'evaluate',
    *tiny_evaluate,
    "--gin_bindings=Evaluation.methods = {'ngram': @ngram/Method()}",
    '--gin_bindings=Evaluation.max_new_tokens = 96',
    '--gin_bindings=Evaluation.repeats = 0',
    f'--prompts={tmp_path / "asked.jsonl"}',
  ]
  out = tmp_path / 'out'
  journal = out / 'journal.jsonl'
  process = commands.start(*call, f'--out={out}')
  try:
    while not journal.exists() or b'"turn": 1' not in journal.read_bytes():
      assert process.poll() is None, process.stderr.read().decode()
  finally:
    process.kill()
    process.communicate()
  begun = journal.read_bytes().rpartition(b'\n')[0]
  outcome = commands.run(*call, f'--out={out}')
  assert outcome.code == 0, outcome.err
  assert journal.read_bytes().startswith(begun)
  runs = [
    run
    for line in journal.read_text().splitlines()[1:]
    for run in json.loads(line)['value'].get('generations', [])
  ]
  assert sorted((run['prompt'], run['turn']) for run in runs) == [
    (prompt, turn) for prompt in range(6) for turn in range(2)
  ]
  result = json.loads((out / 'result.json').read_text())
  categories = [row['category'] for row in result['rows']]
  assert categories == ['overall', 'qa', 'turn 1', 'turn 2']
  assert [row['tokens'] for row in result['rows']] == [1152, 1152, 576, 576]
