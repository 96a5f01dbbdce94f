"""Bad input is refused by name, before anything is compiled."""

import dataclasses

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import policies
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.loop import decode
from specsample.loop.decoder import Decoder
from tests.loop import scene
from tests.loop.scene import CHAIN
from tests.loop.scene import generate
from tests.loop.scene import NGRAM
from tests.loop.scene import PARAMS
from tests.loop.scene import PROMPTS
from tests.loop.scene import TARGET
from tests.loop.scene import VOCAB

_PADDED, _LENGTHS = specsample.pad_prompts(PROMPTS)
_SHORT = dataclasses.replace(CHAIN, num_draft_tokens=2)
_SMALL = drafters.Chain(
  model=testing.HashModel(vocab_size=8), num_draft_tokens=2
)


def _lengths(*lengths):
  return {'prompts': _PADDED, 'lengths': np.asarray(lengths)}


@pytest.mark.parametrize(
  'kwargs, message',
  [
    ({'max_new_tokens': 0}, 'max_new_tokens is 0'),
    ({'max_length': 8}, 'prompt of 12 tokens leaves no room for new tokens in'),
    (
      {'model': dataclasses.replace(TARGET, max_length=10)},
      'no room for new tokens in 10',
    ),
    ({'prompts': [[VOCAB]]}, 'id 16, outside the vocabulary of 16'),
    ({'prompts': [[-1]]}, 'id -1'),
    ({'prompts': [[]]}, 'at least one token'),
    ({'prompts': []}, 'at least one prompt'),
    ({'max_new_tokens': 4.0}, 'max_new_tokens is 4.0'),
    ({'max_new_tokens': None}, 'max_new_tokens is None'),
    ({'max_length': '70'}, "max_length is '70'"),
    ({'prompts': [[1.5]]}, '1.5'),
    ({'prompts': [[1 << 40]]}, '1099511627776'),
    ({'prompts': np.asarray([[[1]]])}, 'list of token ids'),
    ({'drafter': _SMALL}, 'target has 16 tokens, but that of the drafter has'),
    ({'stop': specsample.Stop(eos_ids=(99,))}, 'id 99'),
    ({'sampling': specsample.Sampling(temperature=-1.0)}, '-1.0'),
    ({'sampling': specsample.Sampling(top_p=0.0)}, '0.0'),
    ({'sampling': specsample.Sampling(temperature=None)}, 'temperature'),
    ({'sampling': specsample.Sampling(top_k=1.5)}, '1.5'),
    ({'request_ids': np.arange(3)}, 'request_ids'),
    ({'request_ids': [0.2, 0.9, 1, 2]}, 'request_ids'),
    ({'request_ids': [1 << 33, 1, 2, 3]}, '8589934592'),
    (
      {'drafter': NGRAM, 'verify': verify.k_seq},
      "drafts of Ngram: KSeq is not exact .* kind 'point_mass', only",
    ),
    (
      {
        'drafter': drafters.Tree(drafter=_SHORT, topology=tree.k_ary((2, 1))),
        'verify': verify.block,
      },
      'drafts of Tree: Block is for chains, .* a tree of 4 nodes',
    ),
    ({'verify': verify.Typical}, 'verify is the class Typical: give a rule'),
    ({'verify': None}, 'verify is None'),
    ({'model': testing.HashModel}, 'model is the class HashModel: give a'),
    ({'model': None}, 'model is None'),
    ({'stop': (2,)}, 'stop is of type tuple: give Stop'),
    ({'sampling': 0.7}, 'sampling is of type float: give Sampling'),
    ({'max_new_tokens': True}, 'max_new_tokens is True'),
    ({'max_new_tokens': np.ones(4, bool)}, 'max_new_tokens is of dtype bool'),
    ({'max_length': True}, 'max_length is True'),
    ({'request_ids': np.ones(4, bool)}, 'request_ids is of dtype bool'),
    (
      {'drafter': drafters.Ngram(num_draft_tokens=100_000)},
      'num_draft_tokens is 100000, but the model takes 4096 tokens',
    ),
    (_lengths(1, 65, 1, 1), '65'),
    (_lengths(1, 1), r'\(2,\)'),
    (_lengths(1, 1, 1, 1) | {'prompts': _PADDED.astype('f')}, 'float32'),
    (_lengths(*[True] * 4), 'lengths is of dtype bool'),
    (
      {'prompts': [[1, 2], [3]], 'lengths': [2, 1]},
      r'prompts is \[\[1, 2\], \[3\]\]: .*pad',
    ),
    ({'params': {'target': {}}}, r"\['target'\].*params\['drafter'\]"),
    (
      {'params': {'layers': {}}, 'drafter': NGRAM},
      r"\['layers'\].*'target'",
    ),
    *(({'key': x}, r'jax\.random\.key') for x in (None, 0, np.zeros(3))),
  ],
)
def test_refuses(kwargs, message):
  before = decode._prefill._cache_size()
  with pytest.raises(ValueError, match=message):
    generate(**kwargs)
  assert decode._prefill._cache_size() == before


def test_a_key_is_one_key():
  keys = jax.random.split(jax.random.key(0), 2)
  with pytest.raises(ValueError, match='make one with'):
    generate(key=keys)


@pytest.mark.parametrize('name', ['rbg', 'unsafe_rbg'])
def test_generators_that_share_bits_among_rows_are_refused(name):
  key = jax.random.key(0, impl=name)
  # The reason: under vmap, rows after the first are drawn from the first's key.
  others = jax.random.split(key, 3).at[0].set(key)
  rows = jax.vmap(jax.random.bits)
  changed = others.at[0].set(jax.random.key(1, impl=name))
  assert (rows(others)[1:] != rows(changed)[1:]).all()
  with pytest.raises(ValueError, match=f"'{name}'.*impl='threefry2x32'"):
    generate(key=key)


def test_parameters_belong_to_the_model_and_the_drafter(tiny_llama):
  model, own = tiny_llama
  wide = testing.tiny_llama(vocab_size=96, dim=32).init(jax.random.key(0))
  hydra = drafters.Hydra(model=model, num_draft_tokens=2)
  heads = hydra.init_params(jax.random.key(0))
  more = dataclasses.replace(hydra, num_draft_tokens=100)
  chain = drafters.Chain(model=model, num_draft_tokens=2)
  unknown = heads | {'prefix': {'a': np.ones(2)}}
  for drafter, target, of_drafter, message in (
    (NGRAM, wide, {}, r"'target'\].* embedding has shape .*32"),
    (
      NGRAM,
      {**own, 'layers': {}},
      {},
      r'layers\.0\.\S* of shape .* is missing',
    ),
    (more, own, heads, r"'drafter'\].* heads\.2\S* .* missing"),
    (hydra, own, unknown, r"'drafter'\].* is unknown"),
    (chain, own, wide, 'not those of this Transformer'),
  ):
    params = {'target': target, 'drafter': of_drafter}
    with pytest.raises(ValueError, match=message):
      generate(params=params, model=model, drafter=drafter)


def test_64_bits_are_refused_and_the_remedy_holds():
  with jax.enable_x64(True):
    with pytest.raises(ValueError, match=r'jax\.enable_x64\(False\)'):
      generate(drafter=NGRAM)
    with jax.enable_x64(False):
      output = generate(drafter=NGRAM)
  np.testing.assert_array_equal(output.tokens, generate(drafter=NGRAM).tokens)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: specsample.Stop(sequences=((),)), 'empty'),
    (lambda: specsample.Stop(eos_ids=3), 'eos_ids are 3'),
    (lambda: specsample.Stop(eos_ids=(2.0,)), '2.0'),
    (lambda: specsample.Stop(eos_ids=b'ab'), "eos_ids are b'ab'"),
    (lambda: specsample.Stop(sequences=[[True]]), 'True'),
    (lambda: specsample.Stop(sequences=(1, 2)), 'sequences'),
    (lambda: drafters.Ngram(num_draft_tokens=-1), 'is -1'),
    (lambda: drafters.Ngram(num_draft_tokens=2.0), 'is 2.0'),
    (lambda: drafters.Chain(model=TARGET, num_draft_tokens=0), 'NoDraft'),
    (lambda: tree.Topology((0, 0.9)), r'parents are \(0, 0.9\)'),
    (lambda: policies.Fixed(1.5), 'num_draft_tokens is 1.5'),
    (
      lambda: drafters.Skip(model=TARGET, layers=(0,), num_draft_tokens=0),
      'NoDraft',
    ),
  ],
)
def test_settings_are_checked_when_they_are_made(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_lists_are_taken_where_tuples_are_meant():
  stop = specsample.Stop(eos_ids=[3], sequences=[[1, 2]])
  assert stop == specsample.Stop(eos_ids=(3,), sequences=((1, 2),))
  assert hash(stop) is not None
  skip = drafters.Skip(model=TARGET, layers=[0, 1], num_draft_tokens=2)
  output = generate(drafter=skip, stop=stop, request_ids=[0, 1, 2, 3])
  assert output.tokens.shape == (4, 12)


@pytest.mark.slow
def test_what_pads_a_prompt_does_not_matter(tiny_llama):
  model, params = tiny_llama
  run = lambda padding: generate(
    np.asarray([[1, 2, 3, padding], [4, 5, 6, 7]], np.int32),
    {'target': params},
    lengths=np.asarray([3, 4], np.int32),
    model=model,
    drafter=NGRAM,
    sampling=specsample.Sampling(),
    max_new_tokens=4,
  )
  expected = run(0)
  for padding in (-100, model.vocab_size, 1_000_000):
    np.testing.assert_array_equal(run(padding).tokens, expected.tokens)


def test_more_tokens_than_there_is_room_for_are_as_many_as_fit():
  output = generate(max_new_tokens=10**9, max_length=20)
  assert output.tokens.shape[1] < 200
  np.testing.assert_array_equal(_LENGTHS + output.lengths, 20)


def _tree_of(topology):
  return {
    'drafter': drafters.Tree(drafter=_SHORT, topology=topology),
    'verify': verify.tree,
  }


@pytest.mark.parametrize(
  ('made_for', 'changes', 'message'),
  [
    ({}, {'state': None}, 'state is None: give what prefill or advance'),
    ({}, {'max_rounds': 1.5}, 'max_rounds is .*: give one integer'),
    ({}, {'max_rounds': np.ones(4, 'i4')}, r'max_rounds has shape \(4,\)'),
    ({}, {'max_finished': True}, 'max_finished is .*: give one integer'),
    ({}, {'stop': specsample.Stop(eos_ids=(99,))}, 'id 99'),
    (
      {},
      {'drafter': dataclasses.replace(NGRAM, num_draft_tokens=8)},
      r'proposes 8 .* made for 4',
    ),
    (
      _tree_of(tree.chain(2)),
      _tree_of(tree.k_ary((3, 3))),
      r'proposes 12 .* of 2, .* made for 2 ',
    ),
    (
      {},
      {'model': testing.tiny_llama(VOCAB)},
      r"'target'\].* is missing",
    ),
  ],
)
def test_advance_names_what_it_cannot_use(made_for, changes, message):
  made_for = {'drafter': NGRAM} | made_for
  _, state = scene.prefill(**made_for)
  arguments = {'model': TARGET, 'verify': verify.chain, 'state': state}
  arguments |= {'max_rounds': 1} | made_for | changes
  parts = [arguments.pop(name) for name in ('model', 'drafter', 'verify')]
  with pytest.raises(ValueError, match=message):
    specsample.advance(Decoder(*parts), PARAMS, **arguments)


@pytest.mark.parametrize('count', [None, 0, 1.5, True])
def test_finish_names_what_it_cannot_use(count):
  _, state = scene.prefill(drafter=NGRAM)
  with pytest.raises(ValueError, match=f'max_new_tokens is {count}: give an'):
    specsample.finish(state, max_new_tokens=count)


def test_fewer_tokens_can_be_taken_out_than_were_decoded():
  decoder, state = scene.prefill(drafter=NGRAM, max_new_tokens=8)
  state = specsample.advance(decoder, PARAMS, state, max_rounds=8)
  output = specsample.finish(state, max_new_tokens=3)
  whole = specsample.finish(state, max_new_tokens=8)
  assert output.lengths.tolist() == [3] * 4
  np.testing.assert_array_equal(output.tokens, whole.tokens[:, :3])
