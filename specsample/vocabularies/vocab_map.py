"""How the tokens of a draft model relate to those of its target.

Timor et al., 2502.05202. Tokens are the same if they stand for the same text
(`spelling`), not if they have the same name or id.
"""

import dataclasses
import enum

import numpy as np

from specsample import sharding
from specsample import text
from specsample.loading import load
from specsample.types import Params
from specsample.vocabularies import token_bytes

# Vocabularies of one language share a third and more of the smaller one.
# Unrelated ones share an alphabet, of which no word can be drafted.
_LEAST_SHARE = 0.05


class Kind(enum.Enum):
  """How two vocabularies relate.

  IDENTITY: the same tokens by the same ids: `drafters.Chain` drafts.
  PADDING: the same, but one has more rows: `match_vocabulary`, then `Chain`.
  D2T: the draft model has some of the target's tokens, by other ids.
  INTERSECTION: each may have tokens that the other has not.
  """

  IDENTITY = 'identity'
  PADDING = 'padding'
  D2T = 'd2t'
  INTERSECTION = 'intersection'


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VocabMap:
  """What `drafters.TLI` has to know of two vocabularies, on the host.

  Attributes:
    kind: how they relate.
    draft_ids: [V] int32, of each of the target's tokens the one of the draft
      model that stands for the same text, -1 where there is none. No draft
      token is there twice.
    pieces: [V, P] int32, the draft model's tokens that are fed to it for each
      of the target's, -1 behind the last. A token that both have is one piece,
      another its text in the draft model's tokens, of more than P the last. A
      byte that is part of a character is a piece of its own. Control tokens
      that the draft model lacks have no pieces.
    prefix: what the draft model reads before any text: the BOS token of its
      family, unless the target's texts begin with one, whose piece it then is.
    num_draft_tokens, num_target_tokens: how many each has, without padding.
  """

  kind: Kind
  draft_ids: np.ndarray = dataclasses.field(repr=False)
  pieces: np.ndarray = dataclasses.field(repr=False)
  prefix: tuple[int, ...]
  num_draft_tokens: int
  num_target_tokens: int

  @property
  def num_shared(self) -> int:
    """How many tokens both have."""
    return int(np.sum(self.draft_ids >= 0))

  def params(self, draft_params: Params) -> Params:
    """params['drafter'] of `drafters.TLI`, on the mesh that is set."""
    arrays = {
      'draft_ids': self.draft_ids,
      'pieces': self.pieces,
      'prefix': np.asarray(self.prefix, np.int32),
    }
    axes = {name: (None,) * x.ndim for name, x in arrays.items()}
    return sharding.place(arrays, axes) | {'model': draft_params}


def map_vocabulary(
  draft: load.Loaded, target: load.Loaded, *, max_pieces: int = 8
) -> VocabMap:
  """The map between two models that have tokenizers; errors as `of`'s."""
  return of(
    draft.tokenizer,
    target.tokenizer,
    draft_vocab_size=draft.model.vocab_size,
    target_vocab_size=target.model.vocab_size,
    max_pieces=max_pieces,
  )


def of(
  draft: text.Tokenizer,
  target: text.Tokenizer,
  *,
  draft_vocab_size: int,
  target_vocab_size: int,
  max_pieces: int = 8,
  least_share: float = _LEAST_SHARE,
) -> VocabMap:
  """The map between two vocabularies.

  Args:
    draft: the draft model's tokenizer. target: the target's.
    draft_vocab_size: rows of the draft model, padding included.
    target_vocab_size: V, the same of the target.
    max_pieces: P at most.
    least_share: of the smaller vocabulary, what both have to have.

  Raises:
    ValueError: they share no token, or too few to draft with; a tokenizer of
      which it is not known what its tokens stand for.
  """
  if max_pieces < 1:
    raise ValueError(f'max_pieces is {max_pieces}: feed at least 1 a token')
  there = lambda tokenizer, size: {
    i: token for i, token in token_bytes.of(tokenizer).items() if i < size
  }
  own, others = there(draft, draft_vocab_size), there(target, target_vocab_size)
  draft_ids = np.full(target_vocab_size, -1, np.int32)
  for i, j in _shared(own, others).items():
    draft_ids[i] = j
  num_shared = int(np.sum(draft_ids >= 0))
  if num_shared <= least_share * min(len(own), len(others)):
    raise ValueError(
      f'the draft model has {len(own)} tokens and the target {len(others)}, '
      f'and {num_shared} of them stand for the same text: too few to draft '
      'with; slem.generate drafts text and shares no tokens'
    )
  adds = lambda tokenizer: tuple(tokenizer.encode(''))
  bos = adds(target)
  spelled = _pieces(draft, own, others, draft_ids)
  spelled |= {i: adds(draft) for i in bos if draft_ids[i] < 0}
  longest = max(map(len, spelled.values()), default=1)
  pieces = np.full(
    (target_vocab_size, max(1, min(longest, max_pieces))), -1, np.int32
  )
  pieces[:, 0] = draft_ids
  for i, ids in spelled.items():
    kept = ids[-pieces.shape[1] :]
    pieces[i, : len(kept)] = kept
  return VocabMap(
    kind=_kind(own, others, draft_ids, draft_vocab_size),
    draft_ids=draft_ids,
    pieces=pieces,
    prefix=() if bos else adds(draft),
    num_draft_tokens=len(own),
    num_target_tokens=len(others),
  )


def _shared(own, others) -> dict[int, int]:
  """Draft ids by target id; first of tokens that even have one name."""
  by_name = {token.name: i for i, token in own.items()}
  found = {}
  for i, token in others.items():
    j = by_name.get(token.name)
    if j is not None and own[j] == token:
      found[i] = j
  taken = set(found.values())
  left = lambda tokens, without: token_bytes.canonical(
    {i: token for i, token in tokens.items() if i not in without}
  )
  of_draft, of_target = left(own, taken), left(others, found.keys())
  # A text that is paired is spelled by that pair.
  paired = {(others[i].text, others[i].is_control) for i in found}
  return found | {
    i: of_draft[key]
    for key, i in of_target.items()
    if key in of_draft and key not in paired
  }


def _pieces(draft, own, others, draft_ids):
  """Those of the tokens that the target alone has, by id."""
  ids = [
    i
    for i, token in others.items()
    if draft_ids[i] < 0 and not token.is_control
  ]
  spelled = token_bytes.spell(draft, own, [others[i].text for i in ids])
  return dict(zip(ids, spelled, strict=True))


def _kind(own, others, draft_ids, draft_vocab_size):
  both = own.keys() & others.keys()
  num_shared = np.sum(draft_ids >= 0)
  if num_shared == len(both) and all(draft_ids[i] == i for i in both):
    is_all = len(own) == len(others) == num_shared
    is_identity = is_all and draft_vocab_size == draft_ids.size
    return Kind.IDENTITY if is_identity else Kind.PADDING
  return Kind.D2T if num_shared == len(own) else Kind.INTERSECTION
