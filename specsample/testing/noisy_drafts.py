"""Chains of drafts from a noisy copy of a hash model, to audit samplers."""

import dataclasses

import numpy as np

from specsample.sampling import Sampling
from specsample.testing import cases as cases_lib
from specsample.testing import conditional as conditional_lib
from specsample.testing import proposal as proposal_lib
from specsample.testing.hash_model import HashModel
from specsample.testing.proposal import Drafts
from specsample.testing.proposal import Proposal
from specsample.types import DraftKind

_NUM_DRAFTS = 2


def drawn(model: HashModel, sampling: Sampling) -> Proposal:
  """Returns drafts of two tokens that are drawn from a noisy model."""
  return proposal_lib.sampled(_draft_probs(model, sampling), _NUM_DRAFTS)


def likeliest(model: HashModel, sampling: Sampling) -> Proposal:
  """Returns the two tokens that are most likely under a noisy model."""
  return proposal_lib.most_likely(_draft_probs(model, sampling), _NUM_DRAFTS)


def no_drafts(model: HashModel, sampling: Sampling) -> Proposal:
  """Returns drafts of no tokens: the sampler draws a single token."""
  del sampling

  def propose(t):
    one = (model.vocab_size**t, 1)
    empty = np.zeros((*one, 0), np.int32)
    return Drafts(empty, None, np.ones(one), DraftKind.POINT_MASS)

  return propose


def _draft_probs(model, sampling):
  # About half of the drafts are accepted.
  noisy = dataclasses.replace(model, noise=0.6)
  return conditional_lib.from_model(noisy, {}, cases_lib.PROMPT, sampling)
