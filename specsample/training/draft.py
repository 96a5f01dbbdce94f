"""The objective of a draft model, on given texts or on its own."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from specsample import checks
from specsample.drafters import chain
from specsample.drafters import draft_model
from specsample.training import objective
from specsample.training import rows as rows_lib
from specsample.types import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftObjective(objective.Objective):
  """The losses of a draft model at all positions: an `objective.Objective`.

  Distillation (DistillSpec, Zhou et al., 2310.08461) is token_weight = 0 and
  teacher_weight = 1; `on_policy.resample` writes texts for its best recipes.
  """

  drafter: draft_model.DraftModel | chain.Chain
  _kind: ClassVar[type] = draft_model.DraftModel

  def __call__(self, params, batch):
    """Returns the loss [], and a report from `objective.acceptance`."""
    loss, match, rows = self._compare(params, batch)
    learned = rows.drafts(self.drafter.num_draft_tokens)
    return loss, objective.acceptance(match, learned)

  def matches(self, params, batch):
    _, match, rows = self._compare(params, batch)
    return match & rows.drafts(self.drafter.num_draft_tokens)

  def _compare(self, params, batch):
    rows, crop = rows_lib.of(batch), lambda x: rows_lib.crop(batch, x)
    vectors = crop(
      self.drafter.vectors(params, batch['tokens'], rows_lib.parents(batch))
    )
    hidden = crop(self.hidden(params, batch))
    found = self.compare(1, params, [vectors], hidden, rows)
    # If all drafts before it match the text, a draft is the one after the text.
    num_drafts = self.drafter.num_draft_tokens
    match = [rows_lib.behind(found.match[0], i + 1) for i in range(num_drafts)]
    return jnp.sum(found.losses), jnp.stack(match), rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainObjective(DraftObjective):
  """The losses of a `drafters.Chain`, all of whose draft model is trained.

  Attributes:
    drafter: Chain, over a model with parameters, such as a `Transformer`.
    target: the target, of the draft model's vocabulary and dtype.
  """

  drafter: chain.Chain
  target: Model
  _kind: ClassVar[type] = chain.Chain

  def _check(self):
    super()._check()
    own, target = self.drafter.model, self.target
    checks.has(
      'drafter.model',
      own,
      ('abstract_params',),
      'give a model with parameters to train, such as models.Transformer',
    )
    checks.model(target)
    if (own.vocab_size, own.dtype) != (target.vocab_size, target.dtype):
      raise ValueError(
        f'the draft model has {own.vocab_size} tokens in {own.dtype}, but the '
        f'target has {target.vocab_size} in {target.dtype}: they must be the '
        'same'
      )

  def target_logits(self, params, hidden):
    """See `objective.Objective`: the target has its own unembedding."""
    return self.target.unembed(params['target'], hidden)
