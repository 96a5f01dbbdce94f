"""The operations of a training step's products, counted from their shapes.

A matrix takes two per weight and vector in the forward pass and, if it is
trained, twice as many in the backward pass; attention takes four per pair of
tokens and element of a query, counting all pairs, as in PaLM (Chowdhery et al.,
2204.02311, appendix B). A frozen target is only run forward, and only if a
batch lacks its vectors. What is computed again to save memory does not count,
nor do norms, softmax, lookups of embeddings and the states of recurrent layers.
"""

from collections.abc import Callable
import math

import jax

from specsample.models import experts as experts_lib
from specsample.models import transformer
from specsample.training import objective as objective_lib
from specsample.training.step import Batch
from specsample.types import Params

# Forward, and backward into the matrix and into the vectors.
_TRAINED = 3


def count(
  objective: objective_lib.Objective,
  params: Params,
  batch: Batch,
  *,
  trains_target: bool = False,
) -> float:
  """Returns the operations of one step on a batch, over all devices.

  Args:
    objective: says how many vectors each matrix is multiplied with.
    params: the whole tree, of which only the shapes are read.
    batch: the input of the step, on the host.
    trains_target: whether the target is trained too.
  """
  rows = lambda matrix: objective.num_rows(matrix, batch)
  size = batch['tokens'].shape[1]
  experts = None
  if isinstance(objective.target, transformer.Transformer):
    experts = objective.target.experts
  total = _TRAINED * _of_layers(params['drafter'], rows, size, experts)
  of_target = _TRAINED if trains_target else 1
  features = objective.drafter.feature_layers
  if 'hidden' not in batch or (features and 'features' not in batch):
    num_tokens = batch['tokens'].size
    total += of_target * _of_layers(
      params['target'], lambda _: num_tokens, size, experts
    )
  drafter = objective.drafter
  weights = drafter.model.dim * (drafter.draft_vocab_size or drafter.vocab_size)
  of_drafts = _TRAINED if trains_target else 2  # backward into the vectors only
  logits = of_drafts * rows('unembedding') + of_target * rows('target')
  return total + 2 * logits * weights


def _of_layers(
  params: Params,
  num_rows: Callable[[str], int],
  size: int,
  experts: experts_lib.Experts | None,
) -> float:
  """Returns the operations of one pass, without embeddings and unembedding."""
  total = 0.0
  for name, matrix in _matrices(params).items():
    if 'embedding' in name or name.startswith('vocabulary'):
      continue
    weights = math.prod(matrix.shape)
    if experts is not None and matrix.shape[:-2] == (experts.num_experts,):
      weights *= experts.num_per_token / experts.num_experts
    if '.query.' in name:
      weights += 2 * size * matrix.shape[-1]
    total += 2 * num_rows(name) * weights
  return total


def _matrices(params):
  """Returns what vectors are multiplied by, by name, without any scales."""
  found = {
    jax.tree_util.keystr(path, simple=True, separator='.'): x
    for path, x in jax.tree_util.tree_leaves_with_path(params)
  }
  return {
    name: x
    for name, x in found.items()
    if len(x.shape) > 1 and min(x.shape[-2:]) > 1
  }
