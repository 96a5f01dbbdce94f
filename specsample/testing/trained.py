"""Drafters with parameters on small targets; noise stands in for training."""

from collections.abc import Iterator
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsample import drafters
from specsample.memory import store as store_lib
from specsample.testing import tiny
from specsample.testing.hash_model import HashModel
from specsample.types import Array, Drafter, Model, Params
from specsample.vocabularies import vocab_map


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
  """A target, a drafter for it, and the parameters of both."""

  name: str
  model: Model
  drafter: Drafter
  params: Params


def with_noise(params: Params, key: Array, scale: float = 0.1) -> Params:
  """Adds normal noise to every array of floats.

  Untrained heads are all alike; the noise makes them differ, as training would.
  """
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(key, len(leaves))
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  noise = lambda x, key: scale * jax.random.normal(key, x.shape)
  noisy = [
    x + noise(x, key) if is_float(x) else x
    for x, key in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(tree, noisy)


def scenes(vocab_size: int) -> Iterator[Trained]:
  """Yields a drafter of every kind that is trained, with K = 2.

  The first two read a hash model's hidden vectors, which are the hashes; the
  targets of the others are Llamas. Some draft only every second token of the
  vocabulary.
  """
  hashes = HashModel(vocab_size=vocab_size)
  some = (vocab_size + 1) // 2
  for cls in (drafters.Medusa, drafters.Hydra):
    drafter = cls(model=hashes, num_draft_tokens=2, draft_vocab_size=some)
    yield Trained(cls.__name__, hashes, drafter, _of_hashes(drafter))
  llama = tiny.tiny_llama(vocab_size=vocab_size)
  plus = drafters.Hydra(
    model=llama, num_draft_tokens=2, num_layers=2, prefix_attention=True
  )
  yield Trained('Hydra++', llama, plus, _of_llama(plus))
  draft_model = drafters.DraftModel(
    model=llama, num_draft_tokens=2, layers=(1,), draft_vocab_size=some
  )
  yield Trained('DraftModel', llama, draft_model, _of_llama(draft_model))
  dflash = drafters.DFlash(
    model=llama,
    num_draft_tokens=2,
    feature_layers=(0, 1),
    num_layers=1,
    draft_vocab_size=some,
  )
  yield Trained('DFlash', llama, dflash, _of_llama(dflash))
  dspark = drafters.DSpark(
    model=llama,
    num_draft_tokens=2,
    feature_layers=(0, 1),
    num_layers=1,
    rank=4,
    has_feature_norms=True,
  )
  yield Trained('DSpark', llama, dspark, _of_llama(dspark))
  eagle3 = drafters.Eagle3(
    model=llama,
    num_draft_tokens=2,
    feature_layers=(-1, 0, 1),
    has_feature_norms=True,
  )
  yield Trained('EAGLE-3', llama, eagle3, _of_llama(eagle3))
  eagle = drafters.Eagle(model=llama, num_draft_tokens=2, draft_vocab_size=some)
  yield Trained('EAGLE', llama, eagle, _of_llama(eagle))
  yield _mtp(vocab_size, num_modules=2)


def branching(vocab_size: int) -> Iterator[Trained]:
  """Yields the `scenes` whose drafters can draft trees; MTP has one module."""
  for scene in scenes(vocab_size):
    if scene.name in ('Medusa', 'Hydra', 'EAGLE'):
      yield scene
    if scene.name == 'MTP':
      yield _mtp(vocab_size, num_modules=1)


def confident(vocab_size: int) -> Trained:
  """Returns a drafter, K = 2, whose confidence head trusts only some drafts."""
  (scene,) = (s for s in scenes(vocab_size) if s.name == 'DSpark')
  head = scene.params['drafter']['confidence']
  doubtful = {'kernel': 10 * head['kernel'], 'bias': head['bias'] - 4.3}
  drafter = scene.params['drafter'] | {'confidence': doubtful}
  return dataclasses.replace(scene, params=scene.params | {'drafter': drafter})


def other_vocabulary() -> Trained:
  """Returns a draft model of four tokens for a target of three, K = 2.

  It has two of the target's tokens, under other ids. The third one is made of
  draft tokens 3 and 1, and every text begins with draft token 1. A text with
  many third tokens has no room, so nothing is drafted after it.
  """
  target = HashModel(vocab_size=3)
  model = HashModel(vocab_size=4, noise_seed=2, noise=0.5)
  own = vocab_map.VocabMap(
    kind=vocab_map.Kind.INTERSECTION,
    draft_ids=np.asarray([2, 0, -1], np.int32),
    pieces=np.asarray([[2, -1], [0, -1], [3, 1]], np.int32),
    prefix=(1,),
    num_draft_tokens=4,
    num_target_tokens=3,
  )
  drafter = drafters.TLI(
    model=model, vocab_size=3, num_draft_tokens=2, room=1.0, spare=0
  )
  params = {'target': {}, 'drafter': own.params({})}
  return Trained('TLI', target, drafter, params)


def remembering() -> Trained:
  """Returns a drafter that remembers two tokens after some strings only.

  Some of them come from the row's own text, others from a store.
  """
  drafter = drafters.Suffix(num_draft_tokens=2, min_kept=0.7)
  params = {'target': {}, 'drafter': {'store': _remembered()}}
  return Trained('Suffix', HashModel(vocab_size=3), drafter, params)


def either(inner: Drafter) -> Trained:
  """Returns a drafter that drafts as `remembering` does, or else as `inner`.

  Args:
    inner: drafts after strings of which nothing is remembered; its parameters
      are {}.
  """
  scene = remembering()
  drafter = drafters.Either(
    remembered=scene.drafter, trained=inner, prior_kept=1.0
  )
  own = {'remembered': scene.params['drafter'], 'trained': {}}
  params = {'target': {}, 'drafter': own}
  name = f'Either of Suffix and {type(inner).__name__}'
  return Trained(name, scene.model, drafter, params)


def _remembered():
  texts = [[0, 0, 2, 1]] * 16 + [[1, 0, 1, 2, 0]] * 3
  return store_lib.build(texts, vocab_size=3)


def _mtp(vocab_size, num_modules):
  llama = tiny.tiny_llama(vocab_size=vocab_size)
  mtp = drafters.MTP(
    model=llama,
    num_draft_tokens=2,
    num_modules=num_modules,
    draft_vocab_size=(vocab_size + 1) // 2,
  )
  return Trained('MTP', llama, mtp, _of_llama(mtp))


@functools.cache
def _of_hashes(drafter):
  size = drafter.draft_vocab_size
  params = with_noise(
    drafter.init_params(jax.random.key(0), {}, _every_second(drafter)),
    jax.random.key(1),
  )
  # A hidden vector holds two numbers up to 2 ** 16, an embedding one up to V.
  unembedding = jax.random.normal(jax.random.key(2), (2, size)) / 2**16
  params['vocabulary']['unembedding'] = unembedding
  for head in params['heads'].values():
    if 'read' in head:
      kernel = head['read']['kernel']
      head['read']['kernel'] = kernel.at[2:].multiply(2**17)
  return {'target': {}, 'drafter': params}


@functools.cache
def _of_llama(drafter):
  target = drafter.model.init(jax.random.key(0))
  # As large as hidden vectors, so that it matters which token was drafted.
  target['embedding'] *= np.sqrt(drafter.model.dim)
  params = with_noise(
    drafter.init_params(jax.random.key(1), target, _every_second(drafter)),
    jax.random.key(2),
  )
  return {'target': target, 'drafter': params}


def _every_second(drafter):
  """Returns the ids that are drafted, every second one from the last down.

  None stands for all ids.
  """
  size = drafter.draft_vocab_size
  if size is None:
    return None
  return drafter.model.vocab_size - 1 - 2 * np.arange(size)
