"""sharding.py itself, and what the compiler makes of a sharded vocabulary."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tpu import hlo
import specsample
from specsample import drafters
from specsample import indexing
from specsample import sharding
from specsample import stopping
from specsample import verify
from specsample.loop import decode
from specsample.models import gated_delta
from specsample.models import replicated
from specsample.models import transformer
from tests.on_8_devices import small

MODEL = small.target(1056)
SAMPLING = specsample.Sampling(
  temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1
)


def shapes_on_devices(x):
  return {shard.data.shape for shard in x.addressable_shards}


def setup(mesh, model=MODEL, num_rows=2):
  """Returns placed parameters, prompts and their lengths."""
  with jax.set_mesh(mesh):
    params = sharding.place(model.init(jax.random.key(0)), model.param_axes())
  prompts, lengths = specsample.pad_prompts([[1, 2, 3]] * num_rows)
  return {'target': params, 'drafter': params}, prompts, lengths


def decoder_of(model, rule=specsample.verify.chain):
  return specsample.Decoder(model, small.chain(model), rule)


def compiled_loop(mesh, rule, model=MODEL):
  arguments, decoder = setup(mesh, model), decoder_of(model, rule)
  with jax.set_mesh(mesh):
    state = decode.prefill(
      decoder,
      *arguments,
      jax.random.key(0),
      sampling=SAMPLING,
      max_new_tokens=8,
    )
    stop = stopping.placed(specsample.Stop(), model)
    lowered = decode._advance.lower(decoder, arguments[0], state, stop, 8, 99)
  return hlo.Program(lowered.compile().as_text())


@dataclasses.dataclass(frozen=True)
class Sorting:
  """Chain verification that first sorts each distribution needlessly."""

  lossless = True
  positional = False
  draft_kinds = verify.chain.draft_kinds

  def __call__(self, key, draft, target_probs):
    target_probs = sharding.constrain(target_probs, None, None)
    order = jnp.argsort(target_probs, axis=-1)
    rank = jnp.argsort(order, axis=-1)
    ordered = jnp.take_along_axis(target_probs, order, axis=-1)
    target_probs = jnp.take_along_axis(ordered, rank, axis=-1)
    vocab = sharding.Axis('vocab', target_probs.shape[-1])
    target_probs = sharding.constrain(target_probs, None, vocab)
    return verify.chain(key, draft, target_probs)


@pytest.mark.parametrize(
  'rule, shape, explicit',
  [
    (verify.chain, (1, 8), True),
    (verify.block, (1, 8), False),
    (verify.coupled, (2, 4), True),
  ],
)
def test_no_round_gathers_a_vocabulary(rule, shape, explicit):
  mesh = sharding.make_mesh(*shape, explicit=explicit)
  program = compiled_loop(mesh, rule)
  assert program.collectives()
  assert program.vocab_gathers(MODEL.vocab_size) == 0
  assert program.host_transfers() == 0


@pytest.mark.nightly
@pytest.mark.parametrize('explicit', [True, False])
def test_no_round_gathers_a_vocabulary_that_has_one_factor_of_two(explicit):
  # Like 32,002 and 128,258, which are common in fine-tuned models.
  model = dataclasses.replace(MODEL, vocab_size=1058)
  mesh = sharding.make_mesh(4, 2, explicit=explicit)
  with jax.set_mesh(mesh):
    assert sharding.is_divided(sharding.Axis('vocab', model.vocab_size))
  program = compiled_loop(mesh, verify.chain, model)
  assert program.vocab_gathers(model.vocab_size) == 0


def test_a_rule_that_gathers_the_vocabulary_is_found():
  mesh = sharding.make_mesh(1, 8, explicit=False)
  program = compiled_loop(mesh, Sorting())
  assert program.vocab_gathers(MODEL.vocab_size) > 0


@dataclasses.dataclass(frozen=True)
class Drifting:
  """A model whose cache is no longer sharded once it has been written to."""

  model: transformer.Transformer

  def __getattr__(self, name):
    return getattr(self.model, name)

  def commit(self, cache, length):
    whole = lambda leaf: sharding.constrain(leaf, *[None] * leaf.ndim)
    keys = tuple(whole(leaf) for leaf in cache.keys)
    return dataclasses.replace(cache, keys=keys, length=length)


def test_a_carry_whose_sharding_drifts_is_an_error_when_traced():
  mesh = sharding.make_mesh(2, 4)
  decoder = specsample.Decoder(
    Drifting(MODEL), drafters.NoDraft(), specsample.verify.chain
  )
  arguments = setup(mesh)
  with jax.set_mesh(mesh), pytest.raises(TypeError, match=r'keys\[0\]'):
    decode.prefill(
      decoder,
      *arguments,
      jax.random.key(0),
      sampling=SAMPLING,
      max_new_tokens=8,
    )


@pytest.mark.parametrize('data, model, explicit', [(2, 4, True), (1, 8, False)])
def test_weights_and_caches_are_in_equal_parts(data, model, explicit):
  mesh = sharding.make_mesh(data, model, explicit=explicit)
  arguments = setup(mesh, num_rows=8)
  with jax.set_mesh(mesh):
    state = decode.prefill(
      decoder_of(MODEL),
      *arguments,
      jax.random.key(0),
      sampling=SAMPLING,
      max_new_tokens=8,
    )
  target = arguments[0]['target']
  attention = target['layers'][0]['attention']
  part = lambda name: shapes_on_devices(attention[name]['kernel'])
  assert shapes_on_devices(target['embedding']) == {(32, 1056 // model)}
  assert part('query') == {(32, 64 // model)}
  assert part('key') == {(32, 16 // MODEL.num_kv_heads)}
  assert part('out') == {(64 // model, 32)}
  cache = state.cache.keys[0]
  assert shapes_on_devices(cache) == {(8 // data, 1, *cache.shape[2:])}


@pytest.mark.parametrize('kv_heads', [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize('group', [1, 2, 3, 4, 8])
@pytest.mark.parametrize('model', [2, 4, 6, 8])
def test_a_head_is_never_cut(kv_heads, group, model):
  """A merged axis is divided in the same way as its two axes."""
  kv = sharding.Axis('kv_heads', kv_heads)
  of_kv = sharding.Axis('heads_of_kv', group, within=kv)
  devices = jax.devices()[:model]
  with jax.set_mesh(sharding.make_mesh(1, model, devices=devices)):
    heads = np.arange(kv_heads * group)
    merged = jax.device_put(heads, sharding.from_axes((kv, of_kv)))
    apart = jax.device_put(
      heads.reshape(kv_heads, group), sharding.from_axes(kv, of_kv)
    )
  of_device = lambda x: {
    shard.device: sorted(np.ravel(shard.data)) for shard in x.addressable_shards
  }
  assert of_device(merged) == of_device(apart)


def test_what_does_not_divide_is_logged_once(caplog):
  with (
    caplog.at_level(logging.WARNING),
    jax.set_mesh(sharding.make_mesh(1, 8)),
  ):
    for _ in range(2):
      assert not sharding.is_divided(sharding.Axis('vocab', 50257))
      assert sharding.is_divided(sharding.Axis('vocab', 50258))
  assert [record.getMessage() for record in caplog.records] == [
    'axis vocab of size 50257 does not divide evenly among 8 devices: it is '
    'replicated',
    'axis vocab of size 50258 does not divide evenly among 8 devices: it is '
    'in 2 parts, each on 4 devices',
  ]


def test_rules_can_be_replaced():
  """Under rules that divide only the batch, the vocabulary is whole."""
  vocab = sharding.Axis('vocab', 96)
  with jax.set_mesh(sharding.make_mesh(2, 4)):
    assert sharding.is_divided(vocab)
    with sharding.rules((('batch', ('data',)),)):
      assert not sharding.is_divided(vocab)
      assert sharding.batch_parts() == 2
    with sharding.rules((('batch', ('data', 'model')),)):
      assert sharding.batch_parts() == 8


@pytest.mark.parametrize(
  ('used', 'of_memory', 'of_keys'),
  [
    # Neither the cache nor a recurrent state is divided over the heads.
    (replicated.Replicated, (1, 2, 2, 8, 6), (1, 2, 8, 8)),
    # Each device has the state of one value head.
    (lambda model: model, (1, 1, 1, 8, 6), (1, 1, 8, 8)),
  ],
)
def test_a_path_of_a_tree_is_kept(used, of_memory, of_keys):
  model = dataclasses.replace(
    MODEL,
    num_layers=2,
    delta=gated_delta.Delta(
      layers=(0,), num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6
    ),
  )
  of_kind, params = used(model), jax.device_get(model.init(jax.random.key(0)))
  tokens = np.arange(8).reshape(2, 4)
  parents, path = np.asarray([[0, 0, 1]] * 2), np.asarray([[0, 1, 3]] * 2)

  @jax.jit
  def after(params, *of_rows):
    tokens, parents, path = (
      sharding.constrain(x, 'batch', None) for x in of_rows
    )
    empty = of_kind.init_cache(2, 8)
    _, cache = of_kind.apply(params, tokens, empty, parents=parents)
    return of_kind.commit(cache, path[:, -1], path)

  arguments = tokens, parents, path
  expected = jax.device_get(after(params, *arguments))
  with jax.set_mesh(sharding.make_mesh(2, 4, explicit=True)):
    params = sharding.place(params, of_kind.param_axes())
    found = after(params, *arguments)
  assert shapes_on_devices(found.states[0].memory) == {of_memory}
  assert shapes_on_devices(found.keys[1]) == {of_keys}
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5),
    jax.device_get(found),
    expected,
  )


@pytest.mark.parametrize(
  ('dtype', 'size'),
  # int8 in tiles, column by column, and in parts that aren't tiles.
  [('float32', 48), ('int8', 8192), ('int8', 256), ('int8', 48)],
)
def test_lookup_is_take(mesh, dtype, size):
  table = np.random.default_rng(0).normal(0, 40, size=(4, size)).astype(dtype)
  ids = np.random.default_rng(1).integers(size, size=(8, 3)).astype(np.int32)
  vocab = sharding.Axis('vocab', size)
  with jax.set_mesh(mesh):
    table_there = sharding.place(table, (None, vocab))
    ids_there = sharding.place(ids, ('batch', None))
    look_up = jax.jit(indexing.lookup, static_argnums=2)
    found = look_up(table_there, ids_there, vocab)
  np.testing.assert_array_equal(found, table.T[ids])


def test_rows_are_written_where_they_are(mesh):
  old = np.arange(8 * 4 * 3.0).reshape(8, 4, 3)
  new = -np.arange(8 * 4 * 3.0).reshape(8, 4, 3)
  rows = np.asarray([5, 0, 99, 7, 99, 99, 99, 99])
  expected = old.copy()
  expected[[5, 0, 7]] = new[[0, 1, 3]]
  axes = ('batch', sharding.Axis('kv_heads', 4), None)
  with jax.set_mesh(mesh):
    arrays = [sharding.place(x.astype('f'), axes) for x in (old, new)]
    found = jax.jit(sharding.write_rows)(arrays[0], rows, arrays[1])
    assert found.sharding == arrays[0].sharding
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'data': 3, 'model': 2}, 'there are 8'),
    ({'data': 8}, 'there are 8'),
    *(
      ({name: value}, f'{name} is {value}: give an integer')
      for name in ('data', 'model', 'num_slices')
      for value in (0, -8, True, None)
    ),
    ({'num_slices': 3}, 'make data a multiple'),
    (
      {'num_slices': 2},
      r'num_slices is 2, but .* slice_index.*: give the number',
    ),
  ],
)
def test_a_mesh_that_cannot_be_made_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(**({'data': 2, 'model': 4} | settings))


# Some parts have 5 or 10 of the 40 tokens, fewer than are asked for.
@pytest.mark.parametrize('k', [3, 12])
def test_the_largest_of_a_divided_vocabulary_are_those_of_a_whole_one(mesh, k):
  # Many values are equal; the first of them come first.
  x = np.random.default_rng(0).integers(6, size=(8, 3, 40)).astype(np.float32)
  with jax.set_mesh(mesh):
    axes = ('batch', None, sharding.Axis('vocab', 40))
    found = jax.jit(indexing.top_k, static_argnums=1)(
      sharding.place(x, axes), k
    )
  for one, expected in zip(found, jax.lax.top_k(x, k), strict=True):
    np.testing.assert_array_equal(one, expected)


def test_values_are_put_where_their_ids_are(mesh):
  rng = np.random.default_rng(0)
  ids = np.stack([rng.permutation(40)[:4] for _ in range(24)]).reshape(8, 3, 4)
  values = rng.normal(size=ids.shape).astype(np.float32)
  expected = np.full((8, 3, 40), -np.inf, np.float32)
  np.put_along_axis(expected, ids, values, axis=-1)
  with jax.set_mesh(mesh):
    found = jax.jit(indexing.put, static_argnums=2)(values, ids, 40)
    axes = ('batch', None, sharding.Axis('vocab', 40))
    assert found.sharding == sharding.from_axes(*axes)
  np.testing.assert_array_equal(found, expected)
