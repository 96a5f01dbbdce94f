"""No two uses of randomness share a key, wherever a row is in its batch."""

import itertools

import jax
import numpy as np

from specsample import streams


def _bits(key):
  return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_every_use_has_its_own_key():
  keys = []
  for request in range(3):
    row = streams.row_key(jax.random.key(0), request)
    keys += [streams.position_key(row, position) for position in range(6)]
    for round in range(6):
      in_round = streams.round_key(row, round)
      keys += [
        streams.accept_key(in_round),
        streams.residual_key(in_round),
        streams.bonus_key(in_round),
      ]
      keys += [
        streams.draft_key(in_round, position, node)
        for position in range(6)
        for node in (None, 1, 2)
      ]
  bits = [_bits(key) for key in keys]
  assert len(set(bits)) == len(bits) == 3 * (6 + 6 * (3 + 6 * 3))


def test_uniforms_of_different_uses_are_uncorrelated():
  row = streams.row_key(jax.random.key(1), 0)
  rounds = jax.vmap(streams.round_key, (None, 0))(row, np.arange(4096))
  uses = {
    'draft': jax.vmap(streams.draft_key)(rounds, np.full(4096, 7)),
    'next draft': jax.vmap(streams.draft_key)(rounds, np.full(4096, 8)),
    'accept': jax.vmap(streams.accept_key)(rounds),
    'residual': jax.vmap(streams.residual_key)(rounds),
    'bonus': jax.vmap(streams.bonus_key)(rounds),
    'position': jax.vmap(streams.position_key, (None, 0))(row, np.arange(4096)),
  }
  uniforms = {
    name: np.asarray(jax.vmap(jax.random.uniform)(keys))
    for name, keys in uses.items()
  }
  for one, other in itertools.combinations(uniforms, 2):
    correlation = np.corrcoef(uniforms[one], uniforms[other])[0, 1]
    assert abs(correlation) < 5 / 64, (one, other)  # five standard errors
