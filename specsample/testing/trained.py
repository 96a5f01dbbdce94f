"""Drafters with parameters on small targets; noise stands in for training."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import drafters
from specsample.drafter import Drafter
from specsample.memory import store as store_lib
from specsample.models import transformer
from specsample.testing.hash_model import HashModel
from specsample.types import Array, Model, Params
from specsample.vocabularies import vocab_map


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
  """A target, a drafter for it, and the parameters of both."""

  name: str
  model: Model
  drafter: Drafter
  params: Params


def untrained(
  model: Model, drafter: Drafter, name: str | None = None
) -> Trained:
  """Returns a scene without parameters, by default named after the drafter."""
  params: Params = {'target': {}, 'drafter': {}}
  return Trained(name or type(drafter).__name__, model, drafter, params)


def tiny_llama(
  vocab_size: int = 32,
  num_layers: int = 2,
  dim: int = 16,
  max_length: int = 256,
) -> transformer.Transformer:
  """Returns a Llama of a few thousand weights, two query heads per key head.

  Its parameters are `tiny_llama().init(jax.random.key(0))`.
  """
  return transformer.Transformer(
    vocab_size=vocab_size,
    num_layers=num_layers,
    dim=dim,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=2 * dim,
    max_length=max_length,
  )


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


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of trained drafter."""

  name: str
  drafter: Callable[..., Any]  # its class
  settings: Callable[[Any], dict[str, Any]] = lambda target: {}
  drafts_some: bool = False  # whether it is tested with a draft vocabulary
  branches: bool = True  # whether it also drafts trees

  def make(self, target: Any, num_draft_tokens: int, some: int | None) -> Any:
    """Returns a drafter for a target, with a draft vocabulary of `some`."""
    settings = self.settings(target)
    if self.drafts_some:
      settings |= {'draft_vocab_size': some}
    return self.drafter(
      model=target, num_draft_tokens=num_draft_tokens, **settings
    )


# The certificate, the tests on eight devices and those of trees and policies
# all go through this table.
CASES = (
  Kind('Medusa', drafters.Medusa, drafts_some=True),
  Kind('Hydra', drafters.Hydra, drafts_some=True),
  Kind(
    'Hydra++',
    drafters.Hydra,
    lambda target: {'num_layers': 2, 'prefix_attention': True},
  ),
  Kind(
    'DraftModel',
    drafters.DraftModel,
    lambda target: {'layers': (target.num_layers - 1,)},
    drafts_some=True,
  ),
  Kind(
    'DFlash',
    drafters.DFlash,
    lambda target: {
      'feature_layers': (0, target.num_layers - 1),
      'num_layers': 1,
    },
    drafts_some=True,
  ),
  Kind(
    'DFlash with windows',
    drafters.DFlash,
    lambda target: {
      'feature_layers': (0, target.num_layers - 1),
      'num_layers': 2,
      'layer_config': dataclasses.replace(
        target, sliding_window=2, sliding_layers=(0,)
      ),
      'causal_layers': (0,),
    },
  ),
  Kind(
    'DSpark',
    drafters.DSpark,
    lambda target: {
      'feature_layers': (0, target.num_layers - 1),
      'num_layers': 1,
      'rank': 4,
      'has_feature_norms': True,
    },
  ),
  Kind(
    'DSpark, gated',
    drafters.DSpark,
    lambda target: {
      'feature_layers': (0,),
      'num_layers': 1,
      'rank': 4,
      'head': 'gated',
    },
    drafts_some=True,
  ),
  Kind(
    'DSpark, RNN',
    drafters.DSpark,
    lambda target: {
      'feature_layers': (0,),
      'num_layers': 1,
      'drafts_from_pending': True,
      'rank': 4,
      'head': 'rnn',
    },
  ),
  Kind(
    'DFlash 2',
    drafters.DFlash2,
    lambda target: {
      'feature_layers': (0, target.num_layers - 1),
      'num_layers': 1,
      'conv_group_size': 4,
      'selector_rank': 4,
      'selector_top_k': max(2, target.vocab_size // 5),
      'final_logit_softcapping': 5.0,
    },
  ),
  Kind(
    'EAGLE-3',
    drafters.Eagle3,
    lambda target: {
      'feature_layers': (-1, 0, target.num_layers - 1),
      'has_feature_norms': True,
    },
  ),
  Kind(
    'P-EAGLE',
    drafters.PEagle,
    lambda target: {
      'feature_layers': (0, target.num_layers - 1),
      'mask_token_id': 1,
      'num_layers': 2,
    },
    drafts_some=True,
  ),
  Kind(
    'Assistant',
    drafters.Assistant,
    lambda target: {
      'kv_layers': (target.num_layers - 1, 0),
      'layer_config': dataclasses.replace(
        target,
        num_layers=4,
        num_shared=2,
        sliding_window=3,
        sliding_layers=(0, 2),
      ),
    },
  ),
  Kind('EAGLE', drafters.Eagle, drafts_some=True),
  Kind('MTP', drafters.MTP, drafts_some=True),
  Kind(
    'MTP of 2',
    drafters.MTP,
    lambda target: {'num_modules': 2},
    drafts_some=True,
    branches=False,
  ),
)
# These read a hash model's hidden vectors, which are the hashes. The targets of
# the others are Llamas.
_OF_HASHES = ('Medusa', 'Hydra')


def scene(name: str, vocab_size: int) -> Trained:
  """Returns the drafter of that name among the `CASES`, with K = 2.

  Some draft only every second token of the vocabulary.
  """
  (kind,) = (kind for kind in CASES if kind.name == name)
  is_of_hashes = name in _OF_HASHES
  target: Any = HashModel(vocab_size=vocab_size)
  if not is_of_hashes:
    target = tiny_llama(vocab_size=vocab_size)
  drafter = kind.make(target, 2, (vocab_size + 1) // 2)
  params = _of_hashes(drafter) if is_of_hashes else _of_llama(drafter)
  return Trained(name, target, drafter, params)


def scenes(vocab_size: int) -> Iterator[Trained]:
  """Yields the `scene` of each of the `CASES`."""
  return (scene(kind.name, vocab_size) for kind in CASES)


def branching(vocab_size: int) -> Iterator[Trained]:
  """Yields the `scenes` whose drafters draft trees."""
  return (scene(kind.name, vocab_size) for kind in CASES if kind.branches)


def confident(vocab_size: int) -> Trained:
  """Returns a drafter, K = 2, whose confidence head trusts only some drafts."""
  one = scene('DSpark', vocab_size)
  head = one.params['drafter']['confidence']
  doubtful = {'kernel': 10 * head['kernel'], 'bias': head['bias'] - 4.3}
  drafter = one.params['drafter'] | {'confidence': doubtful}
  return dataclasses.replace(one, params=one.params | {'drafter': drafter})


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
