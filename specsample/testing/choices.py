"""Whether `verify.Certified` finds the target's best tokens.

The unembeddings are such that rounded tables, bounds and sums go wrong if they
can. Exact scores are computed with NumPy in float64.
"""

from collections.abc import Iterator
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sampling as sampling_lib
from specsample import streams
from specsample.drafters import given
from specsample.loop import certified
from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.models.transformer import Transformer
from specsample.sampling import Sampling
from specsample.types import Draft, DraftKind, Params
from specsample.verify.certified import Certified

_DIM, _VOCAB, _POSITIONS = 48, 640, 32


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
  """An unembedding and hidden vectors, in a dtype."""

  name: str
  kernel: np.ndarray  # [D, V]
  hidden: np.ndarray  # [n, D]
  dtype: str

  def exact(self) -> np.ndarray:
    """Returns the logits [n, V] in float64."""
    rounded = lambda x: np.asarray(jnp.asarray(x, self.dtype), np.float64)
    return rounded(self.hidden) @ rounded(self.kernel)

  def rounding(self) -> np.ndarray:
    """Returns how far [n, V] computed logits may be from exact ones."""
    norm = lambda x: np.sqrt(np.sum(x**2, axis=0))
    size = np.outer(norm(self.hidden.T), norm(self.kernel))
    return _DIM * 2.0**-24 * size

  def params(self, model: Transformer) -> Params:
    """Returns the parameters of a model with this unembedding."""
    params = model.init(jax.random.key(0))
    kernel = jnp.asarray(self.kernel, self.dtype)
    params = params | {'embedding': kernel}
    return {'target': params, 'shadow': model.shadow(params)}

  def model(self, kind: type[Transformer] = Transformer) -> Transformer:
    """Returns a model for this unembedding, of which nothing else is used."""
    return kind(
      vocab_size=_VOCAB,
      dim=_DIM,
      num_layers=1,
      num_heads=1,
      num_kv_heads=1,
      head_dim=16,
      mlp_dim=16,
      max_length=256,
      tie_embeddings=True,
      dtype=self.dtype,
    )


def scenes() -> Iterator[Scene]:
  """Yields all scenes."""
  rng = np.random.default_rng(0)

  def normal(*shape: int) -> np.ndarray:
    return np.asarray(rng.normal(size=shape))

  plain = normal(_DIM, _VOCAB)
  hidden = 3 * normal(_POSITIONS, _DIM)

  def alike(number, distance):
    """Makes groups of `number` tokens that are nearly the same."""
    centres = np.repeat(normal(_DIM, -(-_VOCAB // number)), number, axis=1)
    return centres[:, :_VOCAB] + distance * plain

  # Int8 holds these exactly, so only floating-point rounding is left.
  integers = rng.integers(-126, 127, plain.shape).astype(float)
  integers[0] = 127
  kernels = {
    'normal': plain,
    'heavy tails': rng.standard_t(2, size=plain.shape),
    'groups of 20': alike(20, 1e-3),
    'groups of 320': alike(320, 1e-3),
    'equal tokens': alike(4, 0.0),
    'zero vectors': plain * (np.arange(_VOCAB) % 3 > 0),
    'integers': integers,
  }
  for dtype in ('float32', 'bfloat16'):
    for name, kernel in kernels.items():
      yield Scene(f'{name}, {dtype}', kernel, hidden, dtype)
    yield Scene(f'zero hidden, {dtype}', plain, 0 * hidden, dtype)


def missed_bounds(scene: Scene, model: Transformer) -> int:
  """Counts the logits that the full product may compute above their bound."""
  params = scene.params(model)
  hidden = jnp.asarray(scene.hidden, scene.dtype)
  upper, rounding = model.bounds(params['target'], params['shadow'], hidden)
  # Bounds are rounded themselves, to a part of what they allow for.
  own = scene.rounding()
  misses = np.asarray(upper, float) < scene.exact() + 0.9 * own
  misses |= np.asarray(rounding) < 0.9 * own
  return int(np.sum(misses & (own > 0)))


# Settings for which choices are compared; above temperature 0 rows are coupled.
SETTINGS: dict[str, Sampling] = {
  'greedy': Sampling(temperature=0.0),
  'penalised': Sampling(
    temperature=0.0,
    repetition_penalty=1.4,
    frequency_penalty=0.5,
    logit_bias=np.where(np.arange(_VOCAB) % 5, 0.0, -np.inf),
  ),
  'coupled': Sampling(temperature=0.7),
  'coupled, cold': Sampling(temperature=1e-4),
}


@dataclasses.dataclass(frozen=True)
class Found:
  """What `loop.certified.choose` found in a scene."""

  wrong: int  # positions whose choice scores less than the best token
  scored: dict[int, int]  # from numbers of tokens to positions
  ties: int


def found(
  scene: Scene, model: Transformer, setting: str, verify: Certified
) -> Found:
  """Compares the choices with the best tokens by scores in float64."""
  sampling = SETTINGS[setting]
  params = scene.params(model)
  rng = np.random.default_rng(1)
  prompt = rng.integers(_VOCAB, size=(1, 9)).astype(np.int32)
  drafted = rng.integers(_VOCAB, size=_POSITIONS - 1).astype(np.int32)
  drafter = given.Given(num_draft_tokens=drafted.size)
  decoder = Decoder(model, drafter, verify)
  state = decode.prefill(
    decoder,
    params,
    prompt,
    np.asarray([prompt.size]),
    jax.random.key(3),
    sampling=sampling,
    max_new_tokens=64,
    log_probs=False,
  )
  draft = Draft(
    tokens=jnp.asarray(drafted)[None], probs=None, kind=DraftKind.POINT_MASS
  )
  hidden = jnp.asarray(scene.hidden, scene.dtype)[None]
  tokens, valid, choices = jax.device_get(
    _choose(decoder, params, state, draft, hidden)
  )
  scores, tolerance = _scores(scene, sampling, state, prompt[0], drafted)
  reached = scores[np.arange(_POSITIONS), tokens[0]]
  wrong = scores.max(axis=1) - reached > tolerance
  numbers, positions = np.unique(choices.scored, return_counts=True)
  return Found(
    wrong=int(np.sum(wrong | ~valid[0])),
    scored=dict(zip(numbers.tolist(), positions.tolist(), strict=True)),
    ties=int(np.sum(choices.ties)),
  )


_choose = jax.jit(certified.choose, static_argnames='decoder')


def _scores(scene, sampling, state, prompt, drafted):
  """Returns scores [n, V] in float64, and by how much rounding changes one."""
  logits = scene.exact().copy()
  tolerance = 2 * scene.rounding().max(axis=1)
  if sampling.logit_bias is not None:
    logits = logits + sampling.logit_bias
  if sampling.repetition_penalty is not None:
    for i, row in enumerate(logits):
      counts = np.bincount(drafted[:i], minlength=_VOCAB)
      is_there = counts + np.bincount(prompt, minlength=_VOCAB) > 0
      penalty = sampling.repetition_penalty
      scaled = np.where(row > 0, row / penalty, row * penalty)
      logits[i] = np.where(is_there, scaled, row)
      logits[i] -= sampling.frequency_penalty * counts
    tolerance = tolerance * sampling.repetition_penalty
  if sampling.temperature > 0:
    key = jax.vmap(streams.position_key, (None, 0))(
      state.key[0], prompt.size + jnp.arange(_POSITIONS)
    )
    noise = jax.vmap(lambda key: sampling_lib.coupled_noise(key, _VOCAB))(key)
    logits = logits / sampling.temperature + np.asarray(noise, float)
    tolerance = tolerance / sampling.temperature
  # The scores themselves are float32.
  return logits, tolerance + 2.0**-22 * np.abs(logits).max(
    axis=1, where=np.isfinite(logits), initial=0
  )
