"""What an evaluation writes and prints: texts, scores, tables and sentences."""

import contextlib
import dataclasses
import json
import re
import types

import pytest
import tokenizers

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.command import units
from experiments.decoding import prompts
from experiments.evaluation import decoding
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import generations as generations_lib
from experiments.evaluation import results
from experiments.reporting import rows as rows_lib
from experiments.tasks import task as task_lib
import specsample
from specsample import text
from tests.experiments import reports
from tests.experiments.evaluation import made_up

_END = '<|end|>'


@pytest.fixture(scope='module')
def tokenizer():
  """A byte tokenizer: non-ASCII characters take two tokens or more."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {token: i for i, token in enumerate([*alphabet, 'Ġthe'])}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens([_END])
  return text.Tokenizer(backend=backend, named_tokens={'eos_token': _END})


def test_piece_of_a_character_is_that_of_its_last_token(tokenizer):
  pieces = lambda tokens, **how: text.pieces(tokenizer, tokens, **how)
  tokens = tokenizer.encode('aé€')
  assert pieces(tokens) == ['a', '', 'é', '', '', '€']
  with_end = [*tokens, tokenizer.backend.token_to_id(_END)]
  assert pieces(with_end, skip_special=False)[-1] == _END
  # However a text is cut, its pieces join to it.
  tokens = tokenizer.encode('a ñ€ the 😀')
  for size in range(len(tokens) + 1):
    found = pieces(tokens[:size])
    assert len(found) == size
    assert ''.join(found) == tokenizer.decode(tokens[:size])


def test_file_says_who_wrote_what(tokenizer, tmp_path):
  asked = [
    prompts.Prompt('81', 'qa', 'Why?\n\u2028\ud800', 1),
    prompts.Prompt('b', 'qa', '</script>', 2),
    prompts.Prompt('c', 'math', '1 + 1', 3),
  ]
  tokens = [*tokenizer.encode('né'), tokenizer.backend.token_to_id(_END)]
  of_prompt = lambda i: made_up.generation(
    tokens, origins=[1, 2, 3, 1], emit_rounds=[0, 1, 2, 3], prompt=i
  )
  generations = {'x': list(map(of_prompt, range(3)))}
  generations_lib.write(tmp_path, tokenizer, asked, generations)
  expected = {
    'pieces': ['n', '', 'é', ''],
    'origins': ['accepted', 'correction', 'bonus', 'accepted'],
    'rounds': [0, 1, 2, 3],
    'probs': [0.368] * 4,  # exp(-1)
  }
  path = tmp_path / 'generations.jsonl'
  first, *lines = path.read_text().split('\n')
  assert json.loads(first) == {'schema': 5}
  assert [json.loads(line)['id'] for line in lines[:-1]] == ['81', 'b', 'c']
  assert generations_lib.read(path, 5) == [
    {
      'id': prompt.id,
      'category': prompt.category,
      'text': prompt.text,
      'methods': {'x': expected},
    }
    for prompt in asked
  ]
  # One prompt per category.
  assert [one['id'] for one in generations_lib.read(path, 1)] == ['81', 'c']


@pytest.mark.parametrize(
  ('line', 'number'),
  [
    ('{"schema": 4}\n', 1),
    ('{"schema": 6}\n', 1),
    ('{"rows": []}\n', 1),
    ('[]\n', 1),
    ('{"schema": 5}\n{"id": "a"}\n', 2),
    ('{"schema": 5}\n{"id": "a", "cat', 2),
  ],
)
def test_other_file_is_refused_by_name_and_line(tmp_path, line, number):
  path = tmp_path / 'generations.jsonl'
  path.write_text(line)
  expected = re.escape(f'{path}, line {number}, cannot be read')
  with pytest.raises(ValueError, match=expected):
    generations_lib.read(path, 3)


def _row(method, category, **values):
  return rows_lib.Row(**reports.row(method, category, 2, **values))


def test_score_that_a_method_lacks_is_a_dash():
  share = {'name': 'share', 'value': 0.25, 'ci95': [0.125, 0.5]}
  exact = {'name': 'exact', 'value': 1.0, 'ci95': None}
  rows = [
    _row('a', 'overall', scores={'share': share, 'exact': exact}),
    _row('b', 'overall', scores={'exact': exact}),
  ]
  table = results.scores(rows)
  assert [table.headings, *table.rows] == [
    ['method', 'share', 'exact'],
    ['a', '0.250 (0.125-0.500)', '1.000'],
    ['b', '-', '1.000'],
  ]


def test_category_has_a_cell_for_each_method_but_the_baseline():
  rows = [
    _row('autoregressive', 'overall'),
    _row('a', 'overall', speedup=1.5),
    _row('b', 'overall', speedup=2.0),
    _row('autoregressive', 'math', prompts=7),
    _row('a', 'math', speedup=1.25, prompts=7),
  ]
  table = results.by_category(rows, with_intervals=True)
  assert [table.headings, *table.rows] == [
    ['category', 'prompts', 'a', 'b'],
    ['overall', '2', '1.50x (1.25-1.75), 2.00', '2.00x (1.25-1.75), 2.00'],
    ['math', '7', '1.25x (1.25-1.75), 2.00', '-'],
  ]


def test_acceptance_above_that_of_every_position_is_explained():
  plain = _row('a', 'overall', acceptance=0.6)
  assert results.acceptance_notes([plain]) == []
  shares = {'acceptance': 0.6, 'acceptance_by_position': [0.5, None, 0.55]}
  (note,) = results.acceptance_notes([plain, _row('b', 'overall', **shares)])
  assert 'may exceed that of every position' in note


_METHODS = ('autoregressive', 'ngram')
_PROMPT = prompts.Prompt('0', prompts.NO_CATEGORY, 'a', 1, 'b')


@dataclasses.dataclass(frozen=True)
class _Length:
  """Scores the length of answers, or fails if a word is in `broken`."""

  broken: frozenset[str] = frozenset()
  missing: str | None = None
  name: str = 'Length'
  chat: bool = True

  def unscored(self):
    return self.missing

  def score(self, prompts, answers):
    (samples,) = answers
    if self.broken & {*samples}:
      return []
    return [task_lib.Score('length', float(len(samples[0])), None)]


def _evaluation(**kwargs):
  tokenizer = types.SimpleNamespace(
    decode=lambda tokens: ''.join(map(chr, tokens))
  )
  return evaluation_lib.Evaluation(
    target=specsample.Loaded(None, None, tokenizer),
    methods=dict.fromkeys(
      _METHODS, methods.Method(specsample.drafters.NoDraft())
    ),
    task=_Length(**kwargs),
  )


def _score(journal, **kwargs):
  """Computes the scores that the journal lacks; returns their labels."""
  labels = []
  part = evaluation_lib.Part(
    evaluation=_evaluation(**kwargs),
    tokens=[[1]],
    prompts=[_PROMPT],
    journal=journal,
  )
  units.run(
    list(decoding.scoring(part)),
    journal,
    lambda total: contextlib.nullcontext(labels.append),
  )
  return labels


def test_what_could_not_be_scored_is_scored_when_the_run_goes_on(tmp_path):
  journal = journal_lib.Journal(tmp_path, {})
  journal.add((decoding.MEMORY, 0), {'bytes_per_second': 1.0})
  for name in _METHODS:
    record = made_up.generation([ord(x) for x in name]).to_json()
    journal.add(('generation', name, 0), {'generations': [record]})
  both = [f'scores, {name}' for name in _METHODS]
  assert _score(journal, missing='a package is missing') == both
  assert _score(journal, broken=frozenset({'ngram'})) == both
  plain, ngram = (decoding.score_key(_evaluation(), x) for x in _METHODS)
  assert plain in journal and ngram not in journal
  assert _score(journal) == ['scores, ngram']
  (score,) = journal[ngram]['scores']
  assert score == {'name': 'length', 'value': 5.0, 'ci95': None}
