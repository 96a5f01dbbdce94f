"""`verify.Certified` on a mesh finds the unsharded tokens, with each rule."""

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import sharding
from specsample import tree
from specsample import verify
from specsample.models.transformer import Transformer
from specsample.sampling import Sampling
from specsample.testing.grammar import OneForbidden

MODEL = Transformer(
  vocab_size=320,
  num_layers=2,
  dim=32,
  num_heads=8,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=48,
  max_length=128,
)
PROMPTS = [[3, 1, 4, 1, 5, 3, 1], [2, 7, 1, 8, 2, 7], [9, 9]]
BIAS = np.where(np.arange(320) % 3, 0.0, -np.inf)
SKIP = drafters.Skip(model=MODEL, layers=(0,), num_draft_tokens=2)
CASES = {
  'none': (verify.certified, drafters.NoDraft(), Sampling()),
  'layers': (verify.certified, SKIP, Sampling()),
  'tree': (
    verify.certified,
    drafters.Tree(drafter=SKIP, topology=tree.k_ary((2, 1))),
    Sampling(
      frequency_penalty=0.5,
      logit_bias=BIAS,
      constraint=specsample.Constraint(automaton=OneForbidden(320)),
    ),
  ),
  'coupled': (
    verify.Certified(coupled=True),
    drafters.Ngram(num_draft_tokens=3),
    Sampling(temperature=0.9),
  ),
}


def _generate(params, case):
  rule, drafter, sampling = CASES[case]
  prompts, lengths = specsample.pad_prompts(PROMPTS)
  return specsample.generate(
    params,
    *(prompts, lengths, jax.random.key(1)),
    model=MODEL,
    drafter=drafter,
    verify=rule,
    sampling=sampling,
    max_new_tokens=16,
    log_probs=False,
  )


@pytest.mark.nightly(but=('1x8-auto-coupled', '2x4-explicit-tree'))
@pytest.mark.parametrize('case', CASES)
def test_tokens_are_those_without_a_mesh(mesh, case):
  target = jax.tree.map(lambda x: 2 * x, MODEL.init(jax.random.key(0)))
  alone = _generate({'target': target, 'shadow': MODEL.shadow(target)}, case)
  with jax.set_mesh(mesh):
    placed = sharding.place(target, MODEL.param_axes())
    shadow = MODEL.shadow(placed)
    found = _generate({'target': placed, 'shadow': shadow}, case)
  for field in ('tokens', 'lengths', 'origin', 'rounds'):
    np.testing.assert_array_equal(
      getattr(found, field), getattr(alone, field), err_msg=field
    )
  np.testing.assert_array_equal(found.choices.scored, alone.choices.scored)
