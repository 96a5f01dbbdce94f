"""Rows of a table from made-up generations."""

import dataclasses
import json

import pytest

from experiments import methods
from experiments.evaluation import evaluation
from experiments.evaluation import papers
from experiments.evaluation import results
from experiments.evaluation import round_parts
from experiments.evaluation import table as table_lib
from experiments.methods import random_weights
from experiments.tasks import summarization
from experiments.timing import roofline
import specsample
from specsample import drafters
from specsample import stats
from specsample.models import experts
from specsample.models import transformer
from tests.experiments.evaluation import made_up

_MODEL = transformer.Transformer(
  vocab_size=10,
  num_layers=1,
  dim=4,
  num_heads=2,
  num_kv_heads=1,
  head_dim=2,
  mlp_dim=8,
  max_length=64,
  tie_embeddings=True,
)
_OF_EXPERTS = dataclasses.replace(
  _MODEL, experts=experts.Experts(num_experts=4, num_per_token=1, mlp_dim=8)
)
_EXPERT_BYTES = 4 * 4 * 3 * 32  # three matrices of 4 x 8 per expert
_BANDWIDTH = 1e6
_NGRAM = drafters.Ngram(num_draft_tokens=1)
_BASELINE = 'autoregressive'


@pytest.fixture
def table():
  """A method and a baseline on three prompts, two of them in one batch."""
  of = lambda batch, category, seconds, tokens, rounds: made_up.generation(
    tokens, rounds, batch=batch, category=category, seconds=seconds
  )
  common = {
    'plain_prefill_ms': 50,
    'plain_ms': 20,
    'prefill_tokens': 64,
    'overhead_ms': {'1': 3},
    'kind': 'sampled',
  }
  baseline = {'prefill_ms': 50, 'draft_ms': 0, 'verify_ms': {'1': 17}}
  ngram = {'prefill_ms': 60, 'draft_ms': 1, 'verify_ms': {'1': 21}}
  return table_lib.Table(
    evaluation.Evaluation(
      target=specsample.Loaded(_MODEL, random_weights.params(_MODEL), None),
      methods=dict.fromkeys((_BASELINE, 'ngram'), methods.Method(_NGRAM)),
      batch_size=2,
    ),
    'benchmark',
    {
      _BASELINE: [
        of(0, 'a', 0.4, 8, 8),
        of(0, 'b', 0.2, 4, 4),
        of(1, 'b', 0.6, 12, 12),
      ],
      'ngram': [
        of(0, 'a', 0.2, 8, 5),
        of(0, 'b', 0.1, 4, 3),
        of(1, 'b', 0.3, 12, 7),
      ],
    },
    {_BASELINE: common | baseline, 'ngram': common | ngram},
    _BANDWIDTH,
  )


def _row(table, category='overall', method='ngram'):
  (row,) = (
    r for r in table.rows if (r.method, r.category) == (method, category)
  )
  return row


def _with(table, runs=None, parts=None, **settings):
  """Changes the method's runs and parts, and settings of the evaluation."""
  runs = table.generations['ngram'] if runs is None else runs
  parts = table.parts['ngram'] | (parts or {})
  return dataclasses.replace(
    table,
    evaluation=dataclasses.replace(table.evaluation, **settings),
    generations=table.generations | {'ngram': runs},
    parts=table.parts | {'ngram': parts},
  )


def _drafting(table, batch_size, share=1 / 4):
  """Returns the table with drafts in a `share` of the method's rounds."""

  def changed(run, batch):
    drafted = share * run.stats.rounds
    proposed = (run.stats.rounds - drafted, drafted)
    counts = dataclasses.replace(run.stats, proposed=proposed)
    return dataclasses.replace(run, batch=batch, stats=counts)

  runs = [
    changed(run, i // batch_size)
    for i, run in enumerate(table.generations['ngram'])
  ]
  # A round without a draft is faster.
  by_width = {'verify_ms': {'0': 15, '1': 21}, 'overhead_ms': {'0': 2, '1': 4}}
  return _with(table, runs, by_width)


def test_one_forward_pass_serves_a_batch(table):
  # Embedding, attention (2 of 4 x 4, 2 of 4 x 2), three of 4 x 8, three norms.
  weights = 4 * (40 + 2 * 16 + 2 * 8 + 3 * 32 + 3 * 4)
  # Keys and values of 2 numbers halfway through the generation, and a length.
  cache = lambda tokens: 4 * (2 * 2 * (6 + tokens // 2) + 1)
  first = 5 * weights + 5 * cache(8) + 3 * cache(4)
  second = 7 * weights + 7 * cache(12)
  percent = 100 * (first + second) / _BANDWIDTH / 0.6
  assert _row(table).percent_of_roofline == pytest.approx(percent)
  # Both categories are in the first batch, whose time cannot be split.
  for category in ('a', 'b'):
    assert _row(table, category).percent_of_roofline is None
  # The tables of a run have one roofline.
  slower = dataclasses.replace(table, memory_bandwidth=_BANDWIDTH / 2)
  assert _row(slower).percent_of_roofline == pytest.approx(2 * percent)
  for one in table_lib.on_one_machine([slower, table]):
    assert _row(one).percent_of_roofline == pytest.approx(percent)


def test_time_per_token_is_that_of_the_batches(table):
  row = _row(table)
  assert row.batch_size == 2
  assert (row.prompts, row.tokens, row.rounds) == (3, 24, 15)
  assert row.ms_per_token == pytest.approx(1e3 * 0.6 / 24)
  assert row.speedup == pytest.approx(2)
  assert row.speedup_ci95 is None  # only two batches
  assert row.mean_speedup is None  # needs times per prompt, which are not known
  for category in ('a', 'b'):  # decoded together
    of_category = _row(table, category)
    assert of_category.ms_per_token is of_category.speedup is None
    assert of_category.tokens_per_round > 1


def test_prediction_uses_only_parts_and_counts(table):
  # Prefills and rounds of two batches; a batch runs as long as its longest row.
  baseline = 2 * 50 + (8 + 12) * 20
  method = 2 * 60 + (5 + 7) * 25
  predicted = _row(table).predicted_speedup
  assert predicted == pytest.approx(baseline / method)
  assert _row(table, method=_BASELINE).predicted_speedup == 1
  assert _row(table, 'a').predicted_speedup is None
  slower = [
    dataclasses.replace(run, seconds=2 * run.seconds)
    for run in table.generations['ngram']
  ]
  row = _row(_with(table, slower))
  assert row.predicted_speedup == predicted
  assert row.speedup == pytest.approx(1)


def test_nothing_is_predicted_without_baseline_or_prefill(table):
  parts = {name: x | {'prefill_tokens': 0} for name, x in table.parts.items()}
  no_prefill = dataclasses.replace(table, parts=parts)
  alone = _with(table, methods={'ngram': table.evaluation.methods['ngram']})
  runs = {'ngram': table.generations['ngram']}
  alone = dataclasses.replace(alone, generations=runs)
  for found in (no_prefill, alone):
    assert _row(found).predicted_speedup is None


def test_rounds_cost_what_their_widths_cost(table):
  row = _row(_drafting(table, 1))
  assert row.plain_rounds == 0.75
  assert row.verify_ms == pytest.approx(0.75 * 15 + 0.25 * 21)
  assert row.verify_ms_by_width == {'0': 15, '1': 21}
  assert (row.draft_ms, row.overhead_ms) == (1, 2.5)
  baseline = 2 * 50 + (8 + 12) * 20
  # Three prefills; one round in four is wide.
  method = 3 * 60 + (5 + 3 + 7) * (1 + 16.5 + 2.5)
  assert row.predicted_speedup == pytest.approx(baseline / method)
  # Without drafts all rounds are as wide where there is only one width.
  row = _row(table)
  assert (row.verify_ms, row.verify_ms_by_width) == (21, None)
  assert row.plain_rounds == 0


def test_round_of_a_batch_is_as_wide_as_its_widest_row(table):
  found = _drafting(table, 2)
  first, second, third = found.generations['ngram']
  # Both rows run for three rounds, then the first one alone.
  plain = 3 * 0.75**2 + 2 * 0.75
  counts = round_parts.rounds_by_drafts([first, second])
  assert counts == pytest.approx([plain, 5 - plain])
  assert round_parts.rounds_by_drafts([third]) == pytest.approx([5.25, 1.75])
  mean = ((plain + 5.25) * 15 + (5 - plain + 1.75) * 21) / (5 + 7)
  assert _row(found).verify_ms == pytest.approx(mean)


@pytest.mark.parametrize(
  'drafter',
  [
    drafters.Adaptive(
      drafter=_NGRAM, policies=(specsample.policies.Fixed(1),), widths=(0, 1)
    ),
    drafters.Either(
      remembered=drafters.Suffix(num_draft_tokens=1), trained=_NGRAM
    ),
  ],
  ids=lambda drafter: type(drafter).__name__,
)
def test_nothing_is_predicted_where_drafting_varies(table, drafter):
  own = table.evaluation.methods | {'ngram': methods.Method(drafter)}
  row = _row(_with(_drafting(table, 1), methods=own))
  assert row.draft_ms is row.verify_ms is row.predicted_speedup is None
  assert row.verify_ms_by_width == {'0': 15, '1': 21}


def test_leviathans_formula_is_of_chains_to_the_end_of_a_text(table):
  def found(*emit_rounds, proposed, accepted):
    rounds = len(set(emit_rounds))
    counts = stats.Stats(len(emit_rounds), rounds, proposed, accepted)
    run = made_up.generation(
      len(emit_rounds), stats=counts, emit_rounds=list(emit_rounds)
    )
    first = {_BASELINE: table.generations[_BASELINE][:1]}
    alone = dataclasses.replace(table, generations=first)
    # With as many tokens at most, the last round has no room for a draft.
    return _row(_with(alone, [run], max_new_tokens=len(emit_rounds)))

  chains = found(0, 0, 1, 2, proposed=(1, 2), accepted=(2, 1))
  # Half of the drafts are accepted; one costs 1 ms, a plain round 20.
  assert chains.leviathan_speedup == pytest.approx(1.5 / (1 + 1 / 20))
  sometimes = found(0, 1, 2, 3, proposed=(2, 2), accepted=(4, 0))
  assert sometimes.leviathan_speedup is None
  without_room = found(0, proposed=(1, 0), accepted=(1, 0))
  assert without_room.leviathan_speedup is without_room.acceptance is None


def test_row_counts_the_greedy_outputs_that_differ_from_the_baseline(table):
  differing = lambda row: (row.outputs_tied, row.outputs_differing)
  assert differing(_row(table)) == (0, 0)
  assert _row(table, method=_BASELINE).outputs_tied is None
  assert _row(table, 'a').outputs_differing is None
  first, *rest = table.generations['ngram']
  other = dataclasses.replace(first, tokens=[2] * len(first.tokens))
  assert differing(_row(_with(table, [other, *rest]))) == (0, 1)


def test_speedup_comes_first_and_a_negative_rest_is_explained(
  table, tmp_path, in_terminal
):
  show = lambda table: in_terminal(
    60, results.show, tmp_path, [table], papers.Paper()
  )
  text = show(table)
  # The last lines of the headings.
  assert text.index('speedup') < text.index('rounds')
  assert 'A negative rest is noise' not in text
  text = show(_with(table, parts={'overhead_ms': {'1': -2.34}}))
  assert '-2.34' in text and 'A negative rest is noise' in text


def test_forward_pass_reads_the_experts_of_its_tokens():
  params = {'target': random_weights.params(_OF_EXPERTS)}
  found = roofline.Roofline.of(params, _OF_EXPERTS, memory_bandwidth=_BANDWIDTH)
  assert found.expert_bytes == _EXPERT_BYTES
  whole = roofline.weight_bytes(params)
  assert found.weight_bytes + found.expert_bytes == whole
  read = lambda tokens: found.seconds(1, 0, tokens) * _BANDWIDTH
  assert read(1) == pytest.approx(found.weight_bytes + _EXPERT_BYTES / 4)
  # With probability 1/4 two tokens share an expert.
  assert read(2) == pytest.approx(found.weight_bytes + _EXPERT_BYTES * 7 / 16)


def test_plain_forward_passes_read_the_experts_of_a_token(table):
  params = random_weights.params(_OF_EXPERTS)
  target = specsample.Loaded(_OF_EXPERTS, params, None)
  seldom, always = (
    _row(_with(_drafting(table, 1, share), target=target)).percent_of_roofline
    for share in (1 / 4, 1)
  )
  # In 11.25 of 15 rounds a quarter of the experts is read, instead of 7 / 16.
  saved = 11.25 * _EXPERT_BYTES * (7 / 16 - 1 / 4) / _BANDWIDTH
  assert always - seldom == pytest.approx(100 * saved / 0.6)


def test_rows_that_emit_nothing_have_no_share_of_the_roofline(table):
  first, second, _ = table.generations['ngram']
  empty = dataclasses.replace(first, tokens=[], log_probs=[], seconds=0.0)
  runs = {_BASELINE: table.generations[_BASELINE][:2], 'ngram': [empty, second]}
  found = dataclasses.replace(table, generations=runs)
  assert _row(found, 'a').percent_of_roofline is None
  assert _row(found).percent_of_roofline > 0


@pytest.mark.parametrize(
  ('lengths', 'fed'),
  [
    (([1],), 0),
    (([2],), 64),
    (([65],), 128),
    (([5, 66],), 128),
    (([129],), 128),
    (([130],), 256),
    (([45],), 64),
    (([45], 256), 128),  # a padded prompt is read in wider chunks
  ],
)
def test_prefill_takes_whole_chunks(lengths, fed):
  assert round_parts.fed_tokens(*lengths) == fed


def test_data_left_out_and_missing_scores_are_named(table, tmp_path, capsys):
  path = tmp_path / 'xsum.jsonl'
  empty = {'document': ' ', 'summary': 'Gone.', 'id': '30'}
  whole = {'document': 'It rained.', 'summary': 'Rain.', 'id': '31'}
  path.write_text(f'{json.dumps(empty)}\n{json.dumps(whole)}')
  task = summarization.xsum(path=str(path))
  provenance = task.source.provenance()
  # The data may be gone by the time the results are reported.
  path.unlink()
  score = {'ROUGE-2': {'name': 'ROUGE-2', 'value': 0.5, 'ci95': None}}
  printed = []
  for names in ((_BASELINE,), (_BASELINE, 'ngram')):
    shown = dataclasses.replace(
      _with(table, task=task),
      scores=dict.fromkeys(names, score),
      provenance=provenance,
    )
    results.show(tmp_path, [shown], papers.Paper())
    printed.append(' '.join(capsys.readouterr().out.split()))
  assert 'XSum: records without a text, left out: 1' in printed[0]
  assert 'no score: ngram could not be scored this time: run' in printed[0]
  assert 'no score' not in printed[1]
