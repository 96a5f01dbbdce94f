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

VOCAB = 16
TARGET = testing.HashModel(vocab_size=VOCAB, seed=3)
CHAIN = drafters.Chain(
  model=dataclasses.replace(TARGET, noise=0.3), num_draft_tokens=3
)
NGRAM = drafters.Ngram(num_draft_tokens=4, min_ngram=1)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], list(range(12)), [9, 9, 9]]
PARAMS = {'target': {}, 'drafter': {}}
_ONE_TOKEN = {
  'model': TARGET,
  'drafter': CHAIN,
  'verify': verify.chain,
  'sampling': specsample.Sampling(),
  'max_new_tokens': 1,
}


def generate(prompts=PROMPTS, params=PARAMS, **kwargs):
  padded, lengths = specsample.pad_prompts(prompts)
  settings = {
    'model': TARGET,
    'drafter': CHAIN,
    'verify': verify.chain,
    'sampling': specsample.Sampling(temperature=1.0),
    'max_new_tokens': 12,
  } | kwargs
  key = jax.random.key(0)
  return specsample.generate(params, padded, lengths, key, **settings)


def prefill(drafter, max_new_tokens=4, rule=verify.chain):
  padded, lengths = specsample.pad_prompts(PROMPTS)
  return specsample.prefill(
    Decoder(TARGET, drafter, rule),
    PARAMS,
    padded,
    lengths,
    jax.random.key(0),
    sampling=specsample.Sampling(),
    max_new_tokens=max_new_tokens,
  )


@pytest.mark.parametrize(
  'kwargs, message',
  [
    ({'max_new_tokens': 0}, 'max_new_tokens is 0'),
    (
      {'max_length': 8},
      'prompt of 12 tokens leaves no room for new tokens in 8',
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
    (
      {
        'drafter': drafters.Chain(
          model=testing.HashModel(vocab_size=8), num_draft_tokens=2
        )
      },
      'target has 16 tokens, but that of the drafter has 8',
    ),
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
        'drafter': drafters.Tree(
          drafter=dataclasses.replace(CHAIN, num_draft_tokens=2),
          topology=tree.k_ary((2, 1)),
        ),
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
  ],
)
def test_refuses(kwargs, message):
  before = decode._prefill._cache_size()
  with pytest.raises(ValueError, match=message):
    generate(**kwargs)
  assert decode._prefill._cache_size() == before


def test_refuses_a_prompt_over_the_models_context():
  small = dataclasses.replace(TARGET, max_length=10)
  with pytest.raises(ValueError, match='no room for new tokens in 10'):
    generate(model=small, drafter=NGRAM)


def test_refuses_lengths_that_do_not_fit():
  padded, _ = specsample.pad_prompts(PROMPTS)
  call = lambda prompts, lengths: specsample.generate(
    PARAMS,
    prompts,
    lengths,
    jax.random.key(0),
    model=TARGET,
    drafter=NGRAM,
    verify=verify.chain,
    sampling=specsample.Sampling(),
    max_new_tokens=4,
  )
  with pytest.raises(ValueError, match='65'):
    call(padded, np.asarray([1, 65, 1, 1]))
  with pytest.raises(ValueError, match=r'\(2,\)'):
    call(padded, np.asarray([1, 1]))
  with pytest.raises(ValueError, match='float32'):
    call(padded.astype(np.float32), np.asarray([1, 1, 1, 1]))
  with pytest.raises(ValueError, match='lengths is of dtype bool'):
    call(padded, np.ones(4, bool))
  with pytest.raises(
    ValueError, match=r'prompts is \[\[1, 2\], \[3\]\]: .*pad'
  ):
    call([[1, 2], [3]], [2, 1])


def test_refuses_parameters_that_are_not_there():
  with pytest.raises(ValueError, match=r"\['target'\].*params\['drafter'\]"):
    generate(params={'target': {}})
  with pytest.raises(ValueError, match=r"\['layers'\].*'target'"):
    generate(params={'layers': {}}, drafter=NGRAM)


def test_parameters_belong_to_the_model_and_the_drafter(tiny_llama):
  model, own = tiny_llama
  wide = testing.tiny_llama(vocab_size=96, dim=32)
  hydra = drafters.Hydra(model=model, num_draft_tokens=2)
  heads = hydra.init_params(jax.random.key(0))
  more = dataclasses.replace(hydra, num_draft_tokens=100)
  run = lambda using, **params: generate(
    params=params, model=model, drafter=using
  )
  with pytest.raises(
    ValueError, match=r"'target'\].* embedding has shape .*32"
  ):
    run(NGRAM, target=wide.init(jax.random.key(0)))
  with pytest.raises(
    ValueError, match=r'layers\.0\.\S* of shape .* is missing'
  ):
    run(NGRAM, target={**own, 'layers': {}})
  with pytest.raises(ValueError, match=r"'drafter'\].* heads\.2\S* .* missing"):
    run(more, target=own, drafter=heads)
  with pytest.raises(ValueError, match=r"'drafter'\].* is unknown"):
    run(hydra, target=own, drafter=heads | {'prefix': {'a': np.ones(2)}})
  chain = drafters.Chain(model=model, num_draft_tokens=2)
  with pytest.raises(ValueError, match='not those of this Transformer'):
    run(chain, target=own, drafter=wide.init(jax.random.key(0)))
  state = prefill(NGRAM)
  with pytest.raises(ValueError, match=r"'target'\].* is missing"):
    specsample.advance(
      Decoder(model, NGRAM, verify.chain), {'target': {}}, state, max_rounds=1
    )


def test_64_bits_are_refused_and_the_remedy_holds():
  with jax.enable_x64(True):
    with pytest.raises(ValueError, match=r'jax\.enable_x64\(False\)'):
      generate(drafter=NGRAM)
    with jax.enable_x64(False):
      output = generate(drafter=NGRAM)
  np.testing.assert_array_equal(output.tokens, generate(drafter=NGRAM).tokens)


@pytest.mark.parametrize('key', [None, 0, np.zeros(3)])
def test_refuses_what_is_no_key(key):
  padded, lengths = specsample.pad_prompts(PROMPTS)
  with pytest.raises(ValueError, match=r'jax\.random\.key'):
    specsample.generate(
      PARAMS,
      padded,
      lengths,
      key,
      model=TARGET,
      drafter=NGRAM,
      verify=verify.chain,
      sampling=specsample.Sampling(),
      max_new_tokens=4,
    )


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


def test_what_pads_a_prompt_does_not_matter(tiny_llama):
  model, params = tiny_llama
  run = lambda padding: specsample.generate(
    {'target': params},
    np.asarray([[1, 2, 3, padding], [4, 5, 6, 7]], np.int32),
    np.asarray([3, 4], np.int32),
    jax.random.key(0),
    model=model,
    drafter=NGRAM,
    verify=verify.chain,
    sampling=specsample.Sampling(),
    max_new_tokens=4,
  )
  expected = run(0)
  for padding in (-100, model.vocab_size, 1_000_000):
    np.testing.assert_array_equal(run(padding).tokens, expected.tokens)


@pytest.mark.parametrize('name', ['rbg', 'unsafe_rbg'])
def test_generators_that_share_bits_among_rows_are_refused(name):
  key = jax.random.key(0, impl=name)
  # The reason: under vmap, rows after the first are drawn from the first's key.
  others = jax.random.split(key, 3).at[0].set(key)
  rows = jax.vmap(jax.random.bits)
  changed = others.at[0].set(jax.random.key(1, impl=name))
  assert (rows(others)[1:] != rows(changed)[1:]).all()
  with pytest.raises(ValueError, match=f"'{name}'.*impl='threefry2x32'"):
    specsample.generate(PARAMS, [[1]], [1], key, **_ONE_TOKEN)


def test_a_key_is_one_key():
  keys = jax.random.split(jax.random.key(0), 2)
  with pytest.raises(ValueError, match='make one with'):
    specsample.generate(PARAMS, [[1]], [1], keys, **_ONE_TOKEN)


def test_more_tokens_than_there_is_room_for_are_as_many_as_fit():
  output = generate(max_new_tokens=10**9, max_length=20)
  assert output.tokens.shape[1] < 200
  lengths = np.asarray([len(prompt) for prompt in PROMPTS])
  np.testing.assert_array_equal(lengths + output.lengths, 20)


def test_a_state_is_for_a_tree_of_as_many_nodes():
  trees = [
    drafters.Tree(
      drafter=dataclasses.replace(CHAIN, num_draft_tokens=2),
      topology=topology,
    )
    for topology in (tree.chain(2), tree.k_ary((3, 3)))
  ]
  state = prefill(trees[0], rule=verify.tree)
  with pytest.raises(ValueError, match=r'proposes 12 .* of 2, .* made for 2 '):
    specsample.advance(
      Decoder(TARGET, trees[1], verify.tree), PARAMS, state, max_rounds=1
    )


def test_a_state_is_for_the_drafter_it_was_made_for():
  state = prefill(NGRAM)
  advance = lambda drafter, **settings: specsample.advance(
    Decoder(TARGET, drafter, verify.chain),
    PARAMS,
    state,
    max_rounds=1,
    **settings,
  )
  with pytest.raises(ValueError, match=r'proposes 8 .* made for 4'):
    advance(dataclasses.replace(NGRAM, num_draft_tokens=8))
  with pytest.raises(ValueError, match='id 99'):
    advance(NGRAM, stop=specsample.Stop(eos_ids=(99,)))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'state': None}, 'state is None: give what prefill or advance'),
    ({'max_rounds': 1.5}, 'max_rounds is .*: give one integer'),
    ({'max_rounds': np.ones(4, np.int32)}, r'max_rounds has shape \(4,\)'),
    ({'max_finished': True}, 'max_finished is .*: give one integer'),
  ],
)
def test_advance_names_what_it_cannot_use(changes, message):
  arguments = {'state': prefill(NGRAM), 'max_rounds': 1} | changes
  with pytest.raises(ValueError, match=message):
    specsample.advance(
      Decoder(TARGET, NGRAM, verify.chain), PARAMS, **arguments
    )


@pytest.mark.parametrize('count', [None, 0, 1.5, True])
def test_finish_names_what_it_cannot_use(count):
  with pytest.raises(ValueError, match=f'max_new_tokens is {count}: give an'):
    specsample.finish(prefill(NGRAM), max_new_tokens=count)


def test_fewer_tokens_can_be_taken_out_than_were_decoded():
  state = prefill(NGRAM, max_new_tokens=8)
  state = specsample.advance(
    Decoder(TARGET, NGRAM, verify.chain), PARAMS, state, max_rounds=8
  )
  output = specsample.finish(state, max_new_tokens=3)
  whole = specsample.finish(state, max_new_tokens=8)
  assert output.lengths.tolist() == [3] * 4
  np.testing.assert_array_equal(output.tokens, whole.tokens[:, :3])
