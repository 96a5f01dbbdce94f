"""`predict`: its table, its files, and a paper's table from compiled rounds."""

import csv
import dataclasses
import json
import re

import gin
import pytest

from experiments.prediction import paper_table
from experiments.prediction import passes
from experiments.prediction import prediction as prediction_lib
from experiments.prediction import report
from specsample import cost
from specsample.cost import chips
from specsample.models import attention
from specsample.models import experts
from specsample.models import gated_delta
from specsample.models import transformer

_MODEL = transformer.Transformer(
  vocab_size=32000,
  num_layers=8,
  dim=1024,
  num_heads=8,
  num_kv_heads=2,
  head_dim=128,
  mlp_dim=4096,
  max_length=2048,
  dtype='bfloat16',
)
_SMALL = dataclasses.replace(_MODEL, num_layers=1)
# Flags, and the parts of the expected line.
_BAD = {
  '--gin_bindings=Prediction.chip = "a100"': "'a100': give one of v4, v5e",
  '--gin_bindings=Prediction.chip = "cpu"': "for chip 'cpu'",
  '--gin_bindings=Prediction.batch_sizes = ()': 'Prediction.batch_sizes is ()',
  '--gin_bindings=Prediction.num_draft_tokens = (0, 2)': 'at least 1',
  '--gin_bindings=Prediction.num_draft_tokens = 4': 'give numbers ... (1,)',
  '--gin_bindings=Prediction.target = @passes.Timed()\n'
  'passes.Timed.ms = {1: "a"}': "Timed.ms is {1: 'a'}: give milliseconds",
  '--gin_bindings=Prediction.acceptances = (0.5, 1.5)': 'acceptance is 1.5',
  '--gin_bindings=Prediction.weights = "int4"': "'int4': give 'int8'",
  '--gin_bindings=Prediction.target = @passes.Timed()\n'
  'passes.Timed.ms = {1: 14.0, 5: 14.0}': '1 to 5 tokens were measured',
  '--compiled=nowhere': '--compiled=nowhere: ... that experiments.compile_tpu',
}


def _compiled(num_draft_tokens, roofline_seconds, collectives):
  return {
    'model': 'Transformer(...)',
    'weights': None,
    'topology': 'v4:2x2x4',
    'mesh': {'data': 1, 'model': 16},
    'batch_size': 1,
    'max_length': 2048,
    'num_draft_tokens': num_draft_tokens,
    'fits': True,
    'roofline_seconds_per_round': roofline_seconds,
    'collectives': [{'per_round': n} for n in collectives],
  }


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """Two folders in `compile_tpu`'s format, filled with round numbers."""
  made = []
  for name, one in {
    'chen': _compiled(4, 0.009, (200, 40)),
    'plain': _compiled(0, 0.0075, (165,)),
  }.items():
    folder = tmp_path_factory.mktemp(name)
    (folder / 'compile.json').write_text(json.dumps([one]))
    made.append(folder)
  return made


@pytest.fixture(scope='module')
def outcomes(commands, folders, tmp_path_factory):
  """Outcomes of the command as it is and with each bad flag, and --out."""
  out = tmp_path_factory.mktemp('out')
  compiled = [f'--compiled={folder}' for folder in folders]
  calls = [
    ['predict', f'--out={out}', *compiled],
    *(['predict', f'--out={out / "bad"}', flag] for flag in _BAD),
  ]
  good, *bad = commands.run_all(calls)
  return good, dict(zip(_BAD, bad, strict=True)), out


def test_the_terminal_says_what_is_predicted(outcomes):
  outcome, _, out = outcomes
  assert outcome.code == 0, outcome.err
  assert 'Predicted speedup, 16 x v4' in outcome.out
  assert re.search(
    r'\ntarget: \S+ billion weights \(80 layers of ', outcome.out
  )
  assert re.search(
    r'\ndrafter: \S+ billion weights \(8 layers of ', outcome.out
  )
  assert 'PREDICTED' in outcome.out
  assert '14.10 / 7.52' in outcome.out
  assert str(out) in outcome.out
  assert max(map(len, outcome.out.splitlines())) <= 100 + len(str(out))


def test_the_files_hold_every_setting(outcomes):
  _, _, out = outcomes
  found = json.loads((out / 'predict.json').read_text())
  assert found['predicted'] is True
  # 4 batch sizes, 2 contexts, 4 acceptance rates, 8 draft lengths.
  assert len(found['rows']) == 4 * 2 * 4 * 8
  with open(out / 'predict.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  assert [json.loads(row['speedup']) for row in rows] == [
    row['speedup'] for row in found['rows']
  ]
  assert len(found['compiled_table']) == 3
  assert (out / 'predict.png').read_bytes().startswith(b'\x89PNG')
  for row in found['rows']:
    round_ms = row['draft_ms'] + row['verify_ms'] + row['overhead_ms']
    assert row['ms_per_token'] == pytest.approx(
      round_ms / row['tokens_per_round']
    )
    assert row['speedup'] == pytest.approx(row['pass_ms'] / row['ms_per_token'])


@pytest.mark.parametrize('flag', _BAD)
def test_one_line_says_what_to_do(outcomes, flag):
  _, bad, out = outcomes
  assert bad[flag].code == 2, bad[flag].err
  assert len(bad[flag].err.splitlines()) == 1
  for part in _BAD[flag].split(' ... '):
    assert part in bad[flag].err
  assert not (out / 'bad').exists()


def _prediction(**changes):
  values = {
    'target': _MODEL,
    'draft': _SMALL,
    'chip': 'v5e',
    'num_draft_tokens': (2, 4),
    'acceptances': (0.8,),
    'batch_sizes': (1,),
    'contexts': (0,),
  }
  return prediction_lib.Prediction(**values | changes)


def test_of_one_row_the_weights_are_all_that_counts():
  rows = prediction_lib.rows(_prediction())
  target, draft = map(passes.decoder, (_MODEL, _SMALL))
  ratio = draft.read_weights(1) / target.read_weights(1)
  for row in rows:
    assert row.verify_bound == 'memory'
    assert row.fits
    assert row.pass_ms == pytest.approx(
      1e3 * 2 * target.read_weights(1) / chips.CHIPS['v5e'].hbm_bandwidth
    )
    assert row.speedup == pytest.approx(
      cost.leviathan_speedup(0.8, row.num_draft_tokens, ratio)
    )
    # The same formula with the ratio of the times.
    assert row.leviathan_speedup == pytest.approx(row.speedup)
    tokens = 1 + sum(0.8 ** (i + 1) for i in range(row.num_draft_tokens))
    share = draft.num_weights() / target.num_weights()
    assert row.memory_bound_speedup == pytest.approx(
      tokens / (1 + row.num_draft_tokens * share)
    )


def test_large_batches_pay_for_drafts():
  small, middle, large = prediction_lib.rows(
    _prediction(num_draft_tokens=(4,), batch_sizes=(1, 64, 512))
  )
  bounds = lambda row: (row.pass_bound, row.verify_bound)
  assert bounds(small) == ('memory', 'memory')
  # Memory bounds a pass over one token per row, products one over five.
  assert bounds(middle) == ('memory', 'products')
  assert bounds(large) == ('products', 'products')
  assert large.speedup < 1 < small.speedup


def test_int8_halves_what_is_read_and_memory_has_an_end():
  wide, narrow = (
    prediction_lib.rows(_prediction(weights=weights))[0]
    for weights in (None, 'int8')
  )
  assert narrow.pass_ms == pytest.approx(wide.pass_ms / 2)
  assert narrow.target == wide.target.replace(
    'bfloat16', 'bfloat16, weights in int8'
  )
  full = prediction_lib.rows(
    _prediction(batch_sizes=(64,), contexts=(1 << 17,))
  )
  assert not any(row.fits for row in full)


def test_timed_passes_give_chens_times():
  predicted = prediction_lib.rows(
    _prediction(
      target=passes.Timed(ms={1: 14.1, 5: 14.1}),
      draft=passes.Timed(ms={1: 1.8}),
      num_draft_tokens=(4,),
      acceptances=(0.71,),
    )
  )[0]
  assert predicted.draft == 'timed passes, milliseconds by tokens 1: 1.8'
  # The 2.83 tokens per loop that 7.52 ms per token imply.
  assert predicted.tokens_per_round == pytest.approx(2.83, abs=0.01)
  assert predicted.ms_per_token == pytest.approx(7.52, rel=0.01)
  assert (
    predicted.fits is predicted.pass_bound is predicted.verify_bound is None
  )


def test_the_best_k_is_that_of_the_largest_speedup():
  rows = prediction_lib.rows(
    _prediction(num_draft_tokens=tuple(range(1, 9)), acceptances=(0.3, 0.9))
  )
  low, high = prediction_lib.best(rows)
  assert (low.acceptance, high.acceptance) == (0.3, 0.9)
  assert low.num_draft_tokens < high.num_draft_tokens
  assert high.speedup == max(row.speedup for row in rows)


def test_a_mixture_of_experts_is_counted_and_latent_attention_refused():
  sent = experts.Experts(num_experts=8, num_per_token=2, mlp_dim=64)
  model = dataclasses.replace(_MODEL, experts=sent)
  decoder = passes.decoder(model)
  assert decoder.read_weights(1) < decoder.read_weights(4)
  latent = attention.Latent(kv_rank=8, rope_dim=2, head_dim=4, value_dim=4)
  delta = gated_delta.Delta(
    layers=(0,), num_key_heads=1, num_value_heads=1, key_dim=4, value_dim=4
  )
  for refused, words in (
    ({'latent': latent}, r'latent vectors \(latent\), which'),
    ({'sliding_window': 8}, r'has a sliding window \(sliding_window\), which'),
    ({'delta': delta}, r'has recurrent layers \(delta\), which'),
    # Gemma 4's, without a window too.
    (
      {'full_head_dim': 256, 'num_shared': 2, 'layer_input_dim': 8},
      r'two sizes .* of others \(num_shared\), embeddings per layer',
    ),
  ):
    with pytest.raises(ValueError, match=rf'{words}.*passes\.Timed, timed'):
      passes.decoder(dataclasses.replace(_MODEL, **refused))


_TABLE = paper_table.Table(
  plain_ms=14.1, draft_ms=1.8, num_draft_tokens=4, printed_ms={'XSum': 7.52}
)


def test_a_papers_table_follows_from_compiled_rounds(folders):
  (row,) = _TABLE.rows(paper_table.read([str(x) for x in folders]))
  tokens = (4 * 1.8 + 14.1) / 7.52
  assert row.tokens_per_round == pytest.approx(tokens)
  assert row.printed_speedup == pytest.approx(1.875)
  assert row.speedup == pytest.approx(tokens * 7.5 / 9)
  # 6.6 ms over 165 collectives are 0.04 ms each.
  assert row.fitted_ms == pytest.approx((9 + 240 * 0.04) / tokens)
  assert row.fitted_speedup == pytest.approx(tokens * 14.1 / 18.6)


def test_a_table_needs_both_programs_of_a_topology(folders):
  chen, _ = folders
  with pytest.raises(ValueError, match='NoDraft, K = 0'):
    _TABLE.rows(paper_table.read([str(chen)]))


@pytest.mark.parametrize(
  ('other', 'models'), [({'batch_size': 8}, 1), ({'model': 'another'}, 2)]
)
def test_programs_of_another_setting_make_no_table(folders, other, models):
  chen, plain = paper_table.read([str(x) for x in folders])
  plain = dataclasses.replace(plain, **other)
  message = f'for {models} models: compile a model for one topology and batch'
  with pytest.raises(ValueError, match=message):
    _TABLE.rows([chen, plain])


@pytest.mark.parametrize(
  ('content', 'why'),
  [
    ([{'fits': True}], "has no 'model', so it may come from an older version"),
    ([_compiled(4, None, (200,))], 'is damaged'),
    ({'a': 1}, 'is not a list of programs'),
    (['a'], 'is not a list of programs'),
  ],
)
def test_another_compile_json_is_refused(tmp_path, content, why):
  (tmp_path / 'compile.json').write_text(json.dumps(content))
  with pytest.raises(ValueError, match=f'{why}.*: compile again'):
    paper_table.read([str(tmp_path)])


def test_programs_with_other_caches_make_no_table(tmp_path):
  for i, (drafts, max_length) in enumerate([(4, 2048), (0, 8192)]):
    one = _compiled(drafts, 0.009, (200,)) | {'max_length': max_length}
    (tmp_path / str(i)).mkdir()
    (tmp_path / str(i) / 'compile.json').write_text(json.dumps([one]))
  programs = paper_table.read([str(tmp_path / str(i)) for i in range(2)])
  with pytest.raises(ValueError, match='compile a model for one topology'):
    _TABLE.rows(programs)


def test_two_programs_of_one_setting_are_refused(folders):
  chen, plain = paper_table.read([str(x) for x in folders])
  other = dataclasses.replace(chen, roofline_ms=99.0)
  with pytest.raises(ValueError, match='two programs with the same model'):
    _TABLE.rows([chen, plain, other])


def test_each_model_has_rows_of_its_own(folders):
  programs = paper_table.read([str(x) for x in folders])
  others = [dataclasses.replace(one, model='another') for one in programs]
  rows = _TABLE.rows([*programs, *others])
  assert [row.model for row in rows] == [programs[0].model, 'another']


@pytest.mark.parametrize('plain', [(0.0075, ()), (0.015, (165,))])
def test_no_wait_is_fitted_where_none_is_left(folders, plain):
  chen, other = paper_table.read([str(x) for x in folders])
  seconds, collectives = plain
  other = dataclasses.replace(
    other, roofline_ms=1e3 * seconds, collectives=sum(collectives)
  )
  (row,) = _TABLE.rows([chen, other])
  assert row.fitted_ms is row.fitted_speedup is None
  assert row.speedup > 0


def test_where_no_draft_pays_the_table_says_so(capsys, tmp_path):
  rows = prediction_lib.rows(_prediction(batch_sizes=(512,), draft=_MODEL))
  report.show(tmp_path, rows, [])
  shown = capsys.readouterr().out
  best = max(row.speedup for row in rows)
  assert f'- ({best:.2f}x)' in shown
  assert 'no K gives a speedup' in shown


def test_the_other_configuration_is_of_llama_on_gpus():
  gin.clear_config()
  gin.parse_config_file('configs/runs/predict_llama_70b.gin')
  prediction = prediction_lib.Prediction()
  gin.clear_config()
  assert (prediction.chip, prediction.devices) == ('h200', 8)
  weights = passes.decoder(prediction.target).num_weights()
  assert weights == 70_553_706_496


def test_a_folder_without_a_program_that_fits_is_named(tmp_path):
  one = _compiled(4, None, ()) | {'fits': False, 'collectives': None}
  (tmp_path / 'compile.json').write_text(json.dumps([one]))
  with pytest.raises(ValueError, match='no program there fits'):
    paper_table.read([str(tmp_path)])
