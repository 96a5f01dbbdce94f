"""Rows of a table from made-up generations."""

import dataclasses
import json

import pytest

from experiments import methods
from experiments.evaluation import evaluation
from experiments.evaluation import papers
from experiments.evaluation import results
from experiments.evaluation import round_parts
from experiments.evaluation import table
from experiments.methods import random_weights
from experiments.reporting import rows as rows_lib
from experiments.tasks import summarization
from experiments.timing import roofline
import specsample
from specsample import stats
from specsample.models import experts
from specsample.models import transformer

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
_BANDWIDTH = 1e6


@pytest.fixture
def in_batches():
  """A method and a baseline on three prompts, two of them in one batch."""

  def generation(batch, category, seconds, tokens, rounds):
    return rows_lib.Generation(
      batch=batch,
      category=category,
      prompt_tokens=6,
      tokens=[1] * tokens,
      log_probs=[-1.0] * tokens,
      seconds=seconds,
      stats=stats.Stats(tokens, rounds, (0, rounds), (rounds, 0)),
    )

  target = specsample.Loaded(_MODEL, random_weights.params(_MODEL), None)
  of_method = [
    generation(0, 'a', 0.2, 8, 5),
    generation(0, 'b', 0.1, 4, 3),
    generation(1, 'b', 0.3, 12, 7),
  ]
  baseline = [
    generation(0, 'a', 0.4, 8, 8),
    generation(0, 'b', 0.2, 4, 4),
    generation(1, 'b', 0.6, 12, 12),
  ]
  names = ('autoregressive', 'ngram')
  common = {
    'plain_prefill_ms': 50,
    'plain_ms': 20,
    'prefill_tokens': 64,
    'overhead_ms': {'1': 3},
    'kind': 'sampled',
  }
  parts = {
    'autoregressive': {'prefill_ms': 50, 'draft_ms': 0, 'verify_ms': {'1': 17}},
    'ngram': {'prefill_ms': 60, 'draft_ms': 1, 'verify_ms': {'1': 21}},
  }
  method = methods.Method(specsample.drafters.Ngram(num_draft_tokens=1))
  return table.Table(
    evaluation.Evaluation(
      target=target, methods=dict.fromkeys(names, method), batch_size=2
    ),
    'benchmark',
    dict(zip(names, (baseline, of_method), strict=True)),
    {name: common | of_method for name, of_method in parts.items()},
    _BANDWIDTH,
  )


def _row(rows, method, category):
  (row,) = (r for r in rows if (r.method, r.category) == (method, category))
  return row


def test_one_pass_of_the_target_serves_a_batch(in_batches):
  rows = in_batches.rows
  # Embedding, attention (2 of 4 x 4, 2 of 4 x 2), three of 4 x 8, three norms.
  weights = 4 * (40 + 2 * 16 + 2 * 8 + 3 * 32 + 3 * 4)
  # Keys and values of 2 numbers halfway through the generation, and a length.
  cache = lambda tokens: 4 * (2 * 2 * (6 + tokens // 2) + 1)
  first = 5 * weights + 5 * cache(8) + 3 * cache(4)
  second = 7 * weights + 7 * cache(12)
  expected = lambda ideal, seconds: 100 * ideal / _BANDWIDTH / seconds
  percent = lambda category: _row(rows, 'ngram', category).percent_of_roofline
  assert percent('overall') == pytest.approx(expected(first + second, 0.6))
  # Both categories are in the first batch, whose time cannot be split.
  assert percent('a') is None and percent('b') is None


def test_tables_of_a_run_have_one_roofline(in_batches):
  slower = dataclasses.replace(in_batches, memory_bandwidth=_BANDWIDTH / 2)
  of_run = table.on_one_machine([slower, in_batches])
  percents = [_row(one.rows, 'ngram', 'overall') for one in of_run]
  (percent,) = {row.percent_of_roofline for row in percents}
  alone = _row(slower.rows, 'ngram', 'overall').percent_of_roofline
  assert percent == pytest.approx(alone / 2)


def test_time_a_token_is_that_of_the_batches(in_batches):
  row = _row(in_batches.rows, 'ngram', 'overall')
  assert row.batch_size == 2
  assert (row.prompts, row.tokens, row.rounds) == (3, 24, 15)
  assert row.ms_per_token == pytest.approx(1e3 * 0.6 / 24)
  assert row.speedup == pytest.approx(2)
  assert row.speedup_ci95 is None  # only two batches
  assert row.mean_speedup is None  # needs times per prompt, which are not known
  for category in ('a', 'b'):  # decoded together
    of_category = _row(in_batches.rows, 'ngram', category)
    assert of_category.ms_per_token is of_category.speedup is None
    assert of_category.tokens_per_round > 1


def test_a_prediction_uses_the_parts_and_the_counts_alone(in_batches):
  rows = in_batches.rows
  # Prefills and rounds of two batches; a batch runs as long as its longest row.
  baseline = 2 * 50 + (8 + 12) * 20
  method = 2 * 60 + (5 + 7) * 25
  predicted = _row(rows, 'ngram', 'overall').predicted_speedup
  assert predicted == pytest.approx(baseline / method)
  assert _row(rows, 'autoregressive', 'overall').predicted_speedup == 1
  assert _row(rows, 'ngram', 'a').predicted_speedup is None
  slower = [
    dataclasses.replace(run, seconds=2 * run.seconds)
    for run in in_batches.generations['ngram']
  ]
  generations = in_batches.generations | {'ngram': slower}
  changed = dataclasses.replace(in_batches, generations=generations).rows
  assert _row(changed, 'ngram', 'overall').predicted_speedup == predicted
  assert _row(changed, 'ngram', 'overall').speedup == pytest.approx(1)


# A round without a draft is faster.
_WIDE = {
  'verify_ms': {'0': 15, '1': 21},
  'overhead_ms': {'0': 2, '1': 4},
}


def _drafting(in_batches, batch_size, share=1 / 4):
  """Returns the table with drafts in a `share` of the method's rounds."""

  def changed(run, batch):
    drafted = share * run.stats.rounds
    proposed = (run.stats.rounds - drafted, drafted)
    counts = dataclasses.replace(run.stats, proposed=proposed)
    return dataclasses.replace(run, batch=batch, stats=counts)

  runs = in_batches.generations['ngram']
  batches = [i // batch_size for i in range(len(runs))]
  return dataclasses.replace(
    in_batches,
    generations=in_batches.generations
    | {'ngram': list(map(changed, runs, batches))},
    parts=in_batches.parts | {'ngram': in_batches.parts['ngram'] | _WIDE},
  )


def test_rounds_cost_what_their_widths_cost(in_batches):
  row = _row(_drafting(in_batches, 1).rows, 'ngram', 'overall')
  assert row.plain_rounds == 0.75
  assert row.verify_ms == pytest.approx(0.75 * 15 + 0.25 * 21)
  assert row.verify_ms_by_width == {'0': 15, '1': 21}
  assert (row.draft_ms, row.overhead_ms) == (1, 2.5)
  baseline = 2 * 50 + (8 + 12) * 20
  # Three prefills; one round in four is wide.
  method = 3 * 60 + (5 + 3 + 7) * (1 + 16.5 + 2.5)
  assert row.predicted_speedup == pytest.approx(baseline / method)
  # Without drafts all rounds are as wide where there is only one width.
  row = _row(in_batches.rows, 'ngram', 'overall')
  assert (row.verify_ms, row.verify_ms_by_width) == (21, None)
  assert row.plain_rounds == 0


def test_a_round_of_a_batch_is_as_wide_as_its_widest_row(in_batches):
  found = _drafting(in_batches, 2)
  first, second, third = found.generations['ngram']
  # Both rows run for three rounds, then the first one alone.
  plain = 3 * 0.75**2 + 2 * 0.75
  counts = round_parts.rounds_by_drafts([first, second])
  assert counts == pytest.approx([plain, 5 - plain])
  assert round_parts.rounds_by_drafts([third]) == pytest.approx([5.25, 1.75])
  row = _row(found.rows, 'ngram', 'overall')
  mean = ((plain + 5.25) * 15 + (5 - plain + 1.75) * 21) / (5 + 7)
  assert row.verify_ms == pytest.approx(mean)


@pytest.mark.parametrize(
  'kind', [specsample.drafters.Adaptive, specsample.drafters.Either]
)
def test_where_drafting_varies_nothing_is_predicted(in_batches, kind):
  ngram = specsample.drafters.Ngram(num_draft_tokens=1)
  if kind is specsample.drafters.Adaptive:
    policy = specsample.policies.Fixed(1)
    drafter = kind(drafter=ngram, policies=(policy,), widths=(0, 1))
  else:
    suffix = specsample.drafters.Suffix(num_draft_tokens=1)
    drafter = kind(remembered=suffix, trained=ngram)
  found = _drafting(in_batches, 1)
  evaluated = dataclasses.replace(
    found.evaluation,
    methods=found.evaluation.methods | {'ngram': methods.Method(drafter)},
  )
  rows = dataclasses.replace(found, evaluation=evaluated).rows
  row = _row(rows, 'ngram', 'overall')
  assert row.draft_ms is row.verify_ms is row.predicted_speedup is None
  assert row.verify_ms_by_width == {'0': 15, '1': 21}


def test_leviathans_formula_is_of_chains_to_the_end_of_a_text(in_batches):
  # With four tokens at most, the last round has no room for a draft.
  def rows(*emit_rounds, proposed, accepted):
    counts = stats.Stats(4, len(set(emit_rounds)), proposed, accepted)
    run = dataclasses.replace(
      in_batches.generations['ngram'][0],
      tokens=[1] * 4,
      stats=counts,
      emit_rounds=list(emit_rounds),
    )
    baseline = in_batches.generations['autoregressive'][:1]
    evaluated = dataclasses.replace(in_batches.evaluation, max_new_tokens=4)
    generations = {'autoregressive': baseline, 'ngram': [run]}
    return dataclasses.replace(
      in_batches, evaluation=evaluated, generations=generations
    ).rows

  chains = rows(0, 0, 1, 2, proposed=(1, 2), accepted=(2, 1))
  found = _row(chains, 'ngram', 'overall')
  # Half of the drafts are kept; one costs 1 ms, a round of the baseline 20.
  assert found.leviathan_speedup == pytest.approx(1.5 / (1 + 1 / 20))
  sometimes = rows(0, 1, 2, 3, proposed=(2, 2), accepted=(4, 0))
  assert _row(sometimes, 'ngram', 'overall').leviathan_speedup is None


def test_a_row_says_which_greedy_outputs_are_not_the_baselines(in_batches):
  overall = lambda rows: _row(rows, 'ngram', 'overall')
  row = overall(in_batches.rows)
  assert (row.outputs_tied, row.outputs_differing) == (0, 0)
  assert _row(in_batches.rows, 'autoregressive', 'overall').outputs_tied is None
  assert _row(in_batches.rows, 'ngram', 'a').outputs_differing is None
  first, *rest = in_batches.generations['ngram']
  other = dataclasses.replace(
    first, tokens=[2] * len(first.tokens), log_probs=[-9.0] * len(first.tokens)
  )
  generations = in_batches.generations | {'ngram': [other, *rest]}
  row = overall(dataclasses.replace(in_batches, generations=generations).rows)
  assert (row.outputs_tied, row.outputs_differing) == (0, 1)


def test_all_of_it_is_printed_whatever_methods_are_called(
  in_batches, tmp_path, in_terminal
):
  renamed = {'autoregressive': 'autoregressive', 'ngram': '[red]a[/b] :bug:'}
  rename = lambda table: {renamed[name]: x for name, x in table.items()}
  named = dataclasses.replace(
    in_batches,
    evaluation=dataclasses.replace(
      in_batches.evaluation, methods=rename(in_batches.evaluation.methods)
    ),
    generations=rename(in_batches.generations),
    parts=rename(in_batches.parts),
  )
  text = in_terminal(80, results.show, tmp_path, [named], papers.Paper())
  lines = text.splitlines()
  assert max(map(len, lines[:-1])) <= 80
  row = _row(named.rows, renamed['ngram'], 'overall')
  of_method = [line for line in lines if line.startswith(' ' + row.method)]
  cells = ' '.join(of_method).replace(row.method, '').split()
  for cell in ('1', '1.60', '25.00', '2.00x', '21.00', '3.00'):
    assert cell in cells
  assert f'{row.percent_of_roofline:.0f}%' in cells
  assert {'K', 'predicted', 'roofline'} <= set(text.split())
  assert f'{row.method}: every output equals autoregressive' in text


def test_a_terminal_has_the_speedup_first_and_explains_a_negative_rest(
  in_batches, tmp_path, in_terminal
):
  show = lambda table: in_terminal(
    60, results.show, tmp_path, [table], papers.Paper()
  )
  text = show(in_batches)
  # The last lines of the headings.
  assert text.index('speedup') < text.index('rounds')
  assert 'A negative rest is noise' not in text
  below = in_batches.parts['ngram'] | {'overhead_ms': {'1': -2.34}}
  parts = in_batches.parts | {'ngram': below}
  text = show(dataclasses.replace(in_batches, parts=parts))
  assert '-2.34' in text and 'A negative rest is noise' in text


def test_answers_of_a_token_leave_no_room_for_drafts(in_batches):
  counts = stats.Stats(1, 1, (1, 0), (1, 0))
  one = lambda run: dataclasses.replace(
    run, tokens=[1], stats=counts, emit_rounds=[0]
  )
  generations = {
    name: [one(run) for run in runs]
    for name, runs in in_batches.generations.items()
  }
  evaluated = dataclasses.replace(in_batches.evaluation, max_new_tokens=1)
  rows = dataclasses.replace(
    in_batches, evaluation=evaluated, generations=generations
  ).rows
  found = _row(rows, 'ngram', 'overall')
  assert found.acceptance is None
  assert found.leviathan_speedup is None


def test_a_pass_reads_the_experts_of_its_tokens():
  sizes = experts.Experts(num_experts=4, num_per_token=1, mlp_dim=8)
  model = dataclasses.replace(_MODEL, experts=sizes)
  params = {'target': random_weights.params(model)}
  found = roofline.Roofline.of(params, model, memory_bandwidth=_BANDWIDTH)
  # Three matrices of 4 x 8 per expert.
  assert found.expert_bytes == 4 * 4 * 3 * 32
  assert found.weight_bytes + found.expert_bytes == roofline.weight_bytes(
    params
  )
  read = lambda tokens: found.seconds(1, 0, tokens) * _BANDWIDTH
  assert read(1) == pytest.approx(found.weight_bytes + found.expert_bytes / 4)
  # With probability 1/4 two tokens share an expert.
  assert read(2) == pytest.approx(
    found.weight_bytes + found.expert_bytes * 7 / 16
  )


def test_plain_passes_read_the_experts_of_a_token(in_batches):
  sizes = experts.Experts(num_experts=4, num_per_token=1, mlp_dim=8)
  model = dataclasses.replace(_MODEL, experts=sizes)
  target = specsample.Loaded(model, random_weights.params(model), None)
  seldom = _drafting(in_batches, 1)
  evaluated = dataclasses.replace(seldom.evaluation, target=target)
  percent = lambda table: (
    _row(
      dataclasses.replace(table, evaluation=evaluated).rows, 'ngram', 'overall'
    ).percent_of_roofline
  )
  of_experts = 4 * 4 * 3 * 32
  # In 11.25 of 15 rounds a quarter of the experts is read, instead of 7 / 16.
  saved = 11.25 * of_experts * (7 / 16 - 1 / 4) / _BANDWIDTH
  always = _drafting(in_batches, 1, share=1)
  assert percent(always) - percent(seldom) == pytest.approx(100 * saved / 0.6)


def test_rows_that_emit_nothing_have_no_share_of_the_roofline(in_batches):
  first, second, _ = in_batches.generations['ngram']
  empty = dataclasses.replace(first, tokens=[], log_probs=[], seconds=0.0)
  generations = in_batches.generations | {
    'autoregressive': in_batches.generations['autoregressive'][:2],
    'ngram': [empty, second],
  }
  rows = dataclasses.replace(in_batches, generations=generations).rows
  assert _row(rows, 'ngram', 'a').percent_of_roofline is None
  assert _row(rows, 'ngram', 'overall').percent_of_roofline > 0


def test_of_typical_prompts_of_a_token_nothing_is_predicted(in_batches):
  parts = {
    name: of_method | {'prefill_tokens': 0}
    for name, of_method in in_batches.parts.items()
  }
  found = dataclasses.replace(in_batches, parts=parts)
  assert _row(found.rows, 'ngram', 'overall').predicted_speedup is None


def test_without_a_baseline_nothing_is_predicted(in_batches):
  generations = {'ngram': in_batches.generations['ngram']}
  evaluated = dataclasses.replace(
    in_batches.evaluation,
    methods={'ngram': in_batches.evaluation.methods['ngram']},
  )
  alone = dataclasses.replace(
    in_batches, evaluation=evaluated, generations=generations
  )
  assert _row(alone.rows, 'ngram', 'overall').predicted_speedup is None


@pytest.mark.parametrize(
  ('lengths', 'fed'),
  [
    ([1], 0),
    ([2], 64),
    ([65], 128),
    ([5, 66], 128),
    ([129], 128),
    ([130], 256),
  ],
)
def test_a_prefill_takes_in_whole_chunks(lengths, fed):
  assert round_parts.fed_tokens(lengths) == fed


def test_a_padded_prompt_is_prefilled_in_wider_chunks():
  assert round_parts.fed_tokens([45]) == 64
  assert round_parts.fed_tokens([45], 256) == 128


def test_what_was_left_out_and_has_no_score_is_said(
  in_batches, tmp_path, capsys
):
  path = tmp_path / 'xsum.jsonl'
  empty = {'document': ' ', 'summary': 'Gone.', 'id': '30'}
  whole = {'document': 'It rained.', 'summary': 'Rain.', 'id': '31'}
  path.write_text(f'{json.dumps(empty)}\n{json.dumps(whole)}')
  evaluated = dataclasses.replace(
    in_batches.evaluation, task=summarization.xsum(path=str(path))
  )
  score = {'ROUGE-2': {'name': 'ROUGE-2', 'value': 0.5, 'ci95': None}}
  provenance = evaluated.task.source.provenance()
  # The data may be gone by the time the results are reported.
  path.unlink()
  printed = {}
  for names in (('autoregressive',), ('autoregressive', 'ngram')):
    shown = dataclasses.replace(
      in_batches,
      evaluation=evaluated,
      scores=dict.fromkeys(names, score),
      provenance=provenance,
    )
    results.show(tmp_path, [shown], papers.Paper())
    printed[len(names)] = ' '.join(capsys.readouterr().out.split())
  assert 'XSum: records without a text, left out: 1' in printed[1]
  assert 'no score: ngram could not be scored this time: run' in printed[1]
  assert 'no score' not in printed[2]
