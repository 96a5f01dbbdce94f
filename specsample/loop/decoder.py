"""What the decoding loop is compiled for."""

import dataclasses

from specsample import checks
from specsample.drafter import Drafter
from specsample.types import Model, Readable, Verifier


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A target, a drafter and a verification rule, checked when they meet.

  It is the static argument of every compiled function of the loop: equal
  decoders share their programs.

  Attributes:
    model: the target.
    drafter: proposes the draft tokens; `NoDraft` gives autoregressive decoding.
    verify: the verification rule.

  Raises:
    ValueError: one of them is none, or the drafter does not fit the model.
  """

  model: Model
  drafter: Drafter
  verify: Verifier

  def __post_init__(self):
    model, drafter = self.model, self.drafter
    checks.model(model)
    checks.is_drafter('drafter', drafter)
    checks.verifier(self.verify)
    if drafter.num_draft_tokens < 0:
      raise ValueError(
        f'num_draft_tokens is {drafter.num_draft_tokens}: draft at least 0 '
        'tokens per round'
      )
    if drafter.num_draft_tokens >= model.max_length:
      raise ValueError(
        f'num_draft_tokens is {drafter.num_draft_tokens}, but the model takes '
        f'{model.max_length} tokens in all: draft fewer tokens per round'
      )
    if drafter.vocab_size not in (None, model.vocab_size):
      raise ValueError(
        f'the vocabulary of the target has {model.vocab_size} tokens, but that '
        f'of the drafter has {drafter.vocab_size}: draft with a model of the '
        'same vocabulary; if one is only padded further, use '
        'specsample.match_vocabulary(draft, target); if the tokens differ, use '
        'drafters.TLI'
      )

  @property
  def is_readable(self) -> bool:
    """Whether the target is a `types.Readable`."""
    return isinstance(self.model, Readable)

  @property
  def widths(self) -> tuple[int, ...]:
    """The numbers of drafts for which a pass is compiled, ascending.

    A target that is not `types.Readable` has only the widest pass, because each
    of several passes would copy its cache.
    """
    if self.is_readable:
      return self.drafter.widths
    return (self.drafter.num_draft_tokens,)

  @property
  def round_tokens(self) -> int:
    """The most tokens that a round writes into a row's buffers.

    They are the pending token and the drafts or, in a tree with fewer nodes
    than levels, a path of full length, which ends in padding.
    """
    return 1 + max(self.drafter.num_draft_tokens, self.drafter.depth)
