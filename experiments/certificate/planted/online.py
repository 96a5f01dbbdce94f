"""A mistake of drafters that learn while they draft, and its detector."""

import dataclasses
import functools

import jax

from experiments.certificate.planted import detectors
from experiments.certificate.planted import drafters
from experiments.certificate.planted.detectors import Reading
from specsample import verify
from specsample.drafter import Drafter
from specsample.loop.decoder import Decoder
from specsample.testing import adapting
from specsample.testing import sample as sample_lib
from specsample.testing.sample import Group
from specsample.training import online
from specsample.types import Params

_GROUPS = (Group((1, 0, 1), detectors.PLAIN),)
_NUM_TOKENS = 5
_NUM_ROWS = 4096
# The learning rate of the optimizer in `adapting.scenes`.
_STEP_SIZE = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnsBeforeItDeclares(drafters.Wrapper):
  """A drafter that updates its weights between the draw and the verdict.

  Tokens are drawn with the old weights, but `probs` come from the new ones.
  """

  learner: online.Learner
  step_size: float

  def propose(self, params, draw, warp, tokens, length, state):
    drawn, _ = super().propose(params, draw, warp, tokens, length, state)
    new = self._learned(params, tokens, length, state)
    return super().propose(
      new, drafters.repeat(drawn.tokens, length), warp, tokens, length, state
    )

  def _learned(self, params, tokens, length, state) -> Params:
    batch = online.examples(
      state.recorded, tokens, length, learner=self.learner
    )

    def loss(own):
      return self.learner.objective(params | {'drafter': own}, batch)[0]

    step = lambda x, slope: x - self.step_size * slope
    own = params['drafter']
    return params | {'drafter': jax.tree.map(step, own, jax.grad(loss)(own))}


@functools.cache
def sampled(is_mistaken: bool = False) -> Reading:
  """Tests the adapting loop's tokens against the exact law by chi-square."""
  _, learner, params = next(adapting.scenes())
  # After an update there is nothing to learn. With one every two rounds, there
  # is something in every second round.
  learner = dataclasses.replace(learner, rounds=2)
  drafter: Drafter = learner.drafter
  if is_mistaken:
    drafter = LearnsBeforeItDeclares(
      drafter=drafter, learner=learner, step_size=_STEP_SIZE
    )
  model = learner.objective.target
  sample = adapting.draw(
    Decoder(model, drafter, verify.chain),
    params,
    _GROUPS,
    jax.random.key(7),
    learner=learner,
    num_tokens=_NUM_TOKENS,
    num_rows=_NUM_ROWS,
  )
  laws = sample_lib.laws(model, params['target'], _GROUPS, _NUM_TOKENS)
  return detectors.of_tokens(sample, laws, _NUM_TOKENS)
