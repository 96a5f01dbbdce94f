"""Verification rules with one mistake each; they claim to be lossless."""

from collections.abc import Callable
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specsample import sampling
from specsample import streams
from specsample import verify
from specsample.types import Array, Draft, DraftKind, Law, Verdict
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class Rule:
  """A rule that claims to be lossless, with a law of its own."""

  lossless: ClassVar[bool] = True
  positional: ClassVar[bool] = False

  law: Callable[[Draft, Array], Law] = verify.chain.law
  draft_kinds: frozenset[DraftKind] = rule.CHAIN_KINDS

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    return rule.draw(key, draft, self.law(draft, target_probs))


def plain_residual(draft, target_probs):
  """Draws from p after a rejection, without subtracting q."""
  law = verify.chain.law(draft, target_probs)
  return dataclasses.replace(law, next=target_probs)


def bonus_after_rejection(draft, target_probs):
  """Draws every next token from the last distribution, the bonus token's."""
  law = verify.chain.law(draft, target_probs)
  bonus = jnp.broadcast_to(target_probs[-1], target_probs.shape)
  return dataclasses.replace(law, next=bonus)


def skipped_bonus(draft, target_probs):
  """Ends the round after a fully accepted draft: K tokens, not K + 1.

  The distribution is right, but each such round gives a token away.
  """
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


def token_residual_in_block(draft, target_probs):
  """Block's decision with the token rule's residual, not scaled by r_i."""
  law = verify.block.law(draft, target_probs)
  residual = verify.chain.law(draft, target_probs).next
  return dataclasses.replace(law, next=residual)


def block_stops_at_first(draft, target_probs):
  """Block's tests, but the first that fails ends the draft."""
  law = verify.block.law(draft, target_probs)
  joint, _ = _joint_ratios(draft, target_probs)
  passes = _block_tests(draft, target_probs, joint, joint[-1:])
  reached = jnp.cumprod(passes)
  fails_next = 1 - jnp.append(passes[1:], 0)
  return dataclasses.replace(law, stop=reached * fails_next)


def uncapped_last_ratio(draft, target_probs):
  """Block, but its last test is of the uncapped product of all ratios.

  An early ratio above 1 makes up for a later one below 1, as in the
  hierarchical rule of 2601.05724.
  """
  law = verify.block.law(draft, target_probs)
  joint, ratios = _joint_ratios(draft, target_probs)
  last = jnp.minimum(jnp.prod(ratios), 1)
  passes = _block_tests(draft, target_probs, joint, last[None])
  fails_after = jnp.cumprod((1 - passes)[::-1])[::-1]
  stop = passes * jnp.append(fails_after[1:], 1)
  return dataclasses.replace(law, stop=stop)


def accepts_at_zero(draft, target_probs):
  """Accepts if u <= p / q, where u is 0 once in eight draws.

  So a token that the target never emits is accepted now and then.
  """
  law = verify.chain.law(draft, target_probs)
  accept = _ratios(draft, target_probs)
  is_impossible = (accept == 0) & (draft.tokens >= 0)
  accept = jnp.where(is_impossible, 1 / 8, jnp.minimum(accept, 1))
  return dataclasses.replace(law, stop=rule.stop_at_rejection(accept))


def residual_of_candidates(draft, target_probs):
  """Draws from (p - q)+ of the tokens that the drafter could have drawn."""
  law = verify.chain.law(draft, target_probs)
  is_candidate = rule.draft_probs(draft, target_probs) > 0
  residual = jnp.where(is_candidate, law.next[:-1], 0)
  residual = rule.normalise(residual, law.next[:-1])
  return dataclasses.replace(law, next=law.next.at[:-1].set(residual))


def softmax_residual(draft, target_probs):
  """Normalises (p - q)+ by a softmax, which gives every token a share."""
  law = verify.chain.law(draft, target_probs)
  draft_probs = rule.draft_probs(draft, target_probs)
  residual = jnp.maximum(target_probs[:-1] - draft_probs, 0)
  next_probs = law.next.at[:-1].set(jax.nn.softmax(residual, axis=-1))
  return dataclasses.replace(law, next=next_probs)


def one_row_late(draft, target_probs):
  """Judges all drafts but the first by the logits of one token earlier."""
  late = jnp.concatenate([target_probs[:1], target_probs[:-1]])
  return verify.chain.law(draft, late)


def first_unverified(draft, target_probs):
  """Keeps the first draft without asking the target."""
  law = verify.chain.law(draft, target_probs)
  accept = jnp.minimum(_ratios(draft, target_probs), 1).at[0].set(1)
  return dataclasses.replace(law, stop=rule.stop_at_rejection(accept))


def masks_one_row_more(draft, target_probs):
  """Forbids token 0, as before a minimum length, in the bonus token's row."""
  masked = rule.normalise(target_probs.at[-1, 0].set(0), target_probs)
  return verify.chain.law(draft, masked)


def greedy_if_sampled(draft, target_probs):
  """Judges drafts that were drawn by the target's most likely tokens."""
  if draft.probs is not None:
    target_probs = jax.nn.one_hot(
      jnp.argmax(target_probs, axis=-1),
      target_probs.shape[-1],
      dtype=target_probs.dtype,
    )
  return verify.chain.law(draft, target_probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedNoise(Rule):
  """Draws the residual with the noise that drew the rejected draft token.

  This happens in the first round, if a prompt has `prompt_length` tokens.
  """

  prompt_length: int

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
class SharedPositionNoise(Rule):
  """Draws the residual with the noise of its position.

  That noise has also drawn the draft token that was rejected there. It is right
  only if the target's own draw decides, as in `verify.Coupled`.
  """

  positional: ClassVar[bool] = True

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
