"""Verification rules with one mistake each; they claim to be lossless."""

import abc
import dataclasses

import jax
import jax.numpy as jnp

from specsample import sampling
from specsample import streams
from specsample import verify
from specsample.types import Array, Draft, Law, Verdict
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class _Rule(abc.ABC):
  lossless = True
  positional = False
  draft_kinds = rule.CHAIN_KINDS

  @abc.abstractmethod
  def law(self, draft: Draft, target_probs: Array) -> Law:
    """See `types.Verifier`."""

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    return rule.draw(key, draft, self.law(draft, target_probs))


@dataclasses.dataclass(frozen=True)
class PlainResidual(_Rule):
  """Draws from p after a rejection, without subtracting q."""

  def law(self, draft, target_probs):
    law = verify.chain.law(draft, target_probs)
    return dataclasses.replace(law, next=target_probs)


@dataclasses.dataclass(frozen=True)
class BonusAfterRejection(_Rule):
  """Draws every next token from the last distribution, the bonus token's."""

  def law(self, draft, target_probs):
    law = verify.chain.law(draft, target_probs)
    bonus = jnp.broadcast_to(target_probs[-1], target_probs.shape)
    return dataclasses.replace(law, next=bonus)


@dataclasses.dataclass(frozen=True)
class SkippedBonus(_Rule):
  """Ends the round after a fully accepted draft: K tokens, not K + 1.

  The distribution is right, but each such round gives a token away.
  """

  def law(self, draft, target_probs):
    law = verify.chain.law(draft, target_probs)
    last_draft = rule.draft_probs(
      dataclasses.replace(draft, probs=None), target_probs
    )[-1]
    stop = law.stop[-2] + law.stop[-1]
    mixed = law.stop[-2] * law.next[-2] + law.stop[-1] * last_draft
    return Law(
      stop=law.stop.at[-2].set(stop).at[-1].set(0),
      next=law.next.at[-2].set(rule.normalise(mixed, target_probs[-2])),
    )


@dataclasses.dataclass(frozen=True)
class TokenResidualInBlock(_Rule):
  """Block's decision with the token rule's residual, not scaled by r_i."""

  def law(self, draft, target_probs):
    law = verify.block.law(draft, target_probs)
    residual = verify.chain.law(draft, target_probs).next
    return dataclasses.replace(law, next=residual)


@dataclasses.dataclass(frozen=True)
class BlockStopsAtFirst(_Rule):
  """Block's tests, but the first that fails ends the draft."""

  def law(self, draft, target_probs):
    law = verify.block.law(draft, target_probs)
    joint, _ = _joint_ratios(draft, target_probs)
    passes = _block_tests(draft, target_probs, joint, joint[-1:])
    reached = jnp.cumprod(passes)
    fails_next = 1 - jnp.append(passes[1:], 0)
    return dataclasses.replace(law, stop=reached * fails_next)


@dataclasses.dataclass(frozen=True)
class UncappedLastRatio(_Rule):
  """Block, but its last test is of the uncapped product of all ratios.

  An early ratio above 1 makes up for a later one below 1, as in the
  hierarchical rule of 2601.05724.
  """

  def law(self, draft, target_probs):
    law = verify.block.law(draft, target_probs)
    joint, ratios = _joint_ratios(draft, target_probs)
    last = jnp.minimum(jnp.prod(ratios), 1)
    passes = _block_tests(draft, target_probs, joint, last[None])
    fails_after = jnp.cumprod((1 - passes)[::-1])[::-1]
    stop = passes * jnp.append(fails_after[1:], 1)
    return dataclasses.replace(law, stop=stop)


@dataclasses.dataclass(frozen=True)
class AcceptsAtZero(_Rule):
  """Accepts if u <= p / q, where u is 0 once in eight draws.

  So a token that the target never emits is accepted now and then.
  """

  def law(self, draft, target_probs):
    law = verify.chain.law(draft, target_probs)
    accept = _ratios(draft, target_probs)
    is_impossible = (accept == 0) & (draft.tokens >= 0)
    accept = jnp.where(is_impossible, 1 / 8, jnp.minimum(accept, 1))
    return dataclasses.replace(law, stop=rule.stop_at_rejection(accept))


@dataclasses.dataclass(frozen=True)
class ResidualOfCandidates(_Rule):
  """Draws from (p - q)+ of the tokens that the drafter could have drawn."""

  def law(self, draft, target_probs):
    law = verify.chain.law(draft, target_probs)
    is_candidate = rule.draft_probs(draft, target_probs) > 0
    residual = jnp.where(is_candidate, law.next[:-1], 0)
    residual = rule.normalise(residual, law.next[:-1])
    return dataclasses.replace(law, next=law.next.at[:-1].set(residual))


@dataclasses.dataclass(frozen=True)
class SoftmaxResidual(_Rule):
  """Normalises (p - q)+ by a softmax, which gives every token a share."""

  def law(self, draft, target_probs):
    law = verify.chain.law(draft, target_probs)
    draft_probs = rule.draft_probs(draft, target_probs)
    residual = jnp.maximum(target_probs[:-1] - draft_probs, 0)
    next_probs = law.next.at[:-1].set(jax.nn.softmax(residual, axis=-1))
    return dataclasses.replace(law, next=next_probs)


@dataclasses.dataclass(frozen=True)
class OneRowLate(_Rule):
  """Judges all drafts but the first by the logits of one token earlier."""

  def law(self, draft, target_probs):
    late = jnp.concatenate([target_probs[:1], target_probs[:-1]])
    return verify.chain.law(draft, late)


@dataclasses.dataclass(frozen=True)
class FirstUnverified(_Rule):
  """Keeps the first draft without asking the target."""

  def law(self, draft, target_probs):
    law = verify.chain.law(draft, target_probs)
    accept = jnp.minimum(_ratios(draft, target_probs), 1).at[0].set(1)
    return dataclasses.replace(law, stop=rule.stop_at_rejection(accept))


@dataclasses.dataclass(frozen=True)
class MasksOneRowMore(_Rule):
  """Forbids token 0, as before a minimum length, in the bonus token's row."""

  def law(self, draft, target_probs):
    masked = rule.normalise(target_probs.at[-1, 0].set(0), target_probs)
    return verify.chain.law(draft, masked)


@dataclasses.dataclass(frozen=True)
class GreedyIfSampled(_Rule):
  """Judges drafts that were drawn by the target's most likely tokens."""

  def law(self, draft, target_probs):
    if draft.probs is not None:
      target_probs = jax.nn.one_hot(
        jnp.argmax(target_probs, axis=-1),
        target_probs.shape[-1],
        dtype=target_probs.dtype,
      )
    return verify.chain.law(draft, target_probs)


@dataclasses.dataclass(frozen=True)
class Equality(_Rule):
  """Draws y from the target and keeps the draft if it equals y; no mistake.

  A draft that is not kept is replaced by y, which is any token but the draft.
  """

  def law(self, draft, target_probs):
    own = rule.of_tokens(target_probs[:-1], draft.tokens)
    others = rule.without_children(target_probs, draft)
    return Law(
      stop=rule.stop_at_rejection(own),
      next=rule.normalise(others, target_probs),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedNoise(_Rule):
  """Draws the residual with the noise that drew the rejected draft token.

  This happens in the first round, if a prompt has `prompt_length` tokens.
  """

  prompt_length: int

  def law(self, draft, target_probs):
    return verify.chain.law(draft, target_probs)

  def __call__(self, key, draft, target_probs):
    verdict = verify.chain(key, draft, target_probs)
    num_accepted = verdict.num_accepted
    noise = streams.draft_key(key, self.prompt_length + num_accepted)
    residual = self.law(draft, target_probs).next[num_accepted]
    next_token = jnp.where(
      num_accepted < draft.tokens.size,
      sampling.draw(noise, residual),
      verdict.next_token,
    )
    return dataclasses.replace(verdict, next_token=next_token)


@dataclasses.dataclass(frozen=True)
class SharedPositionNoise(_Rule):
  """Draws the residual with the noise of its position.

  That noise has also drawn the draft token that was rejected there. It is right
  only if the target's own draw decides, as in `verify.Coupled`.
  """

  positional = True

  def law(self, draft, target_probs):
    return verify.chain.law(draft, target_probs)

  def __call__(self, key, draft, target_probs):
    law = self.law(draft, target_probs)
    node = sampling.draw(streams.accept_key(key[0]), law.stop)
    next_token = sampling.draw_coupled(key[node], law.next[node])
    return Verdict(num_accepted=node, next_token=next_token)


def _ratios(draft, target_probs):
  """Returns p / q of each draft token, [K]."""
  return rule.ratio(
    rule.of_tokens(target_probs[:-1], draft.tokens),
    rule.of_tokens(rule.draft_probs(draft, target_probs), draft.tokens),
  )


def _joint_ratios(draft, target_probs):
  """Returns Block's capped products [K + 1] and the ratios [K] themselves."""
  ratios = _ratios(draft, target_probs)
  joint = [jnp.ones((), ratios.dtype)]
  for ratio in ratios:
    joint.append(jnp.minimum(joint[-1] * ratio, 1))
  return jnp.stack(joint), ratios


def _block_tests(draft, target_probs, joint, last):
  """Returns the probability [K + 1] that the test of each prefix succeeds."""
  draft_probs = rule.draft_probs(draft, target_probs)
  residual = jnp.maximum(joint[:-1, None] * target_probs[:-1] - draft_probs, 0)
  mass = residual.sum(axis=-1)
  room = mass + (1 - joint[:-1])
  passes = jnp.where(room == 0, 1, rule.ratio(mass, room))
  return jnp.concatenate([passes, last]).at[0].set(1)
