"""Chunks of places give the losses and gradients of all places at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsample.training import compared
from specsample.training import losses

_B, _T, _N, _D, _V = 2, 7, 3, 4, 5
_RNG = np.random.default_rng(0)
_normal = lambda *shape: _RNG.normal(size=shape).astype(np.float32)
_KERNEL = _normal(_D, _V)
_VECTORS = _normal(_B, _T, _N, _D)
_LEARNED = _RNG.random((_B, _T)) < 0.6
_DRAFTS = compared.Drafts(
  hidden=_normal(_B, _T, _D),
  ids=_RNG.integers(_V, size=(_B, _T)),
  is_drafted=np.ones((_B, _T), bool),
  is_learned=_LEARNED,
  token_scale=_LEARNED[..., None] * _RNG.random((_B, _T, _N)),
  teacher_scale=_LEARNED[..., None] * _RNG.random((_B, _T, _N)),
)
_WEIGHTS = _normal(_B, _T, _N)


def _compare(kernel, vectors, fixed, drafts):
  logits = vectors @ kernel
  teacher = jax.nn.log_softmax(drafts.hidden @ fixed)[:, :, None]
  teacher = jnp.broadcast_to(teacher, logits.shape)
  ids = jnp.broadcast_to(drafts.ids[..., None], logits.shape[:-1])
  entropy = losses.cross_entropy(logits, ids)
  return compared.Compared(
    losses=drafts.token_scale * entropy
    + drafts.teacher_scale * losses.forward_kl(logits, teacher),
    log_probs=-jax.lax.stop_gradient(entropy),
    match=jnp.argmax(logits, axis=-1) == ids,
  )


def _whole(kernel, vectors):
  return _compare(kernel, vectors, _KERNEL, _DRAFTS)


def _by_places(kernel, vectors, vocab_size=_V, recompute=False):
  return compared.by_places(
    compared.Comparison(_compare, vocab_size, recompute),
    *(kernel, vectors, _KERNEL, _DRAFTS),
  )


# A vocabulary so large that there is only room for one place at a time.
_one_by_one = functools.partial(_by_places, vocab_size=2**30)
_recomputed = functools.partial(_by_places, recompute=True)


def test_what_is_learned_is_that_of_all_places():
  expected = _whole(_KERNEL, _VECTORS)
  for found in (_by_places(_KERNEL, _VECTORS), _one_by_one(_KERNEL, _VECTORS)):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(
        x[_LEARNED], y[_LEARNED], rtol=1e-5
      ),
      found,
      expected,
    )


def test_the_gradient_is_that_of_all_places():
  weighted = lambda compare, kernel, vectors: jnp.sum(
    _WEIGHTS * compare(kernel, vectors).losses
  )
  # No gradient is taken for what isn't trained.
  for wanted in ((1,), (0, 1)):
    of = lambda compare, wanted=wanted: jax.jit(
      jax.grad(functools.partial(weighted, compare), argnums=wanted)
    )(_KERNEL, _VECTORS)
    expected = of(_whole)
    for compare in (_by_places, _one_by_one, _recomputed):
      for x, y in zip(of(compare), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_nothing_learned_is_nothing_found():
  nothing = _DRAFTS._replace(is_learned=np.zeros((_B, _T), bool))
  found = compared.by_places(
    compared.Comparison(_compare, _V), _KERNEL, _VECTORS, _KERNEL, nothing
  )
  for leaf in jax.tree.leaves(found):
    np.testing.assert_array_equal(leaf, 0)
