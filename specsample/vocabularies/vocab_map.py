"""Maps between the tokens of a draft model and those of its target.

Timor et al., 2502.05202. Tokens are the same if they stand for the same text
(`token_bytes`), not if they have the same name or id.
"""

import dataclasses
import enum

import numpy as np

from specsample import sharding
from specsample.loading import load
from specsample.types import Params
from specsample.vocabularies import token_bytes

# Vocabularies of one language share at least a third of the smaller one.
# Unrelated ones share little more than an alphabet, too little to draft words.
_LEAST_SHARE = 0.05


class Kind(enum.Enum):
  """How two vocabularies relate.

  IDENTITY: the same tokens with the same ids; use `drafters.Chain`.
  PADDING: the same, but one has more rows: `match_vocabulary`, then `Chain`.
  D2T: the target has all of the draft model's tokens, but with other ids.
  INTERSECTION: each may have tokens that the other does not have.
  """

  IDENTITY = 'identity'
  PADDING = 'padding'
  D2T = 'd2t'
  INTERSECTION = 'intersection'


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VocabMap:
  """The relation of two vocabularies as `drafters.TLI` needs it, on the host.

  Attributes:
    kind: how they relate.
    draft_ids: [V] int32, for each target token the draft model's token that
      stands for the same text, -1 if there is none. No draft-model token occurs
      twice.
    pieces: [V, P] int32, the draft model's tokens that are fed to it for each
      target token, -1 after the last. A shared token is one piece; any other is
      its text in the draft model's tokens, cut to the last P. A byte that is
      part of a character is a piece of its own. Control tokens that the draft
      model lacks have no pieces.
    prefix: the draft model's BOS token, which it reads before any text. Empty
      if the target's texts begin with BOS, which is then fed as that token.
    num_draft_tokens, num_target_tokens: how many tokens each vocabulary has,
      without padding.
  """

  kind: Kind
  draft_ids: np.ndarray = dataclasses.field(repr=False)
  pieces: np.ndarray = dataclasses.field(repr=False)
  prefix: tuple[int, ...]
  num_draft_tokens: int
  num_target_tokens: int

  @property
  def num_shared(self) -> int:
    """The number of tokens that both have."""
    return int(np.sum(self.draft_ids >= 0))

  def params(self, draft_params: Params) -> Params:
    """Returns params['drafter'] of `drafters.TLI`, on the mesh that is set."""
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
  """Returns the map between two models with tokenizers.

  Args:
    draft, target: the models; their tokenizers need not have all of their rows.
    max_pieces: the largest P allowed.

  Raises:
    ValueError: they share no token, or too few to draft with; or it is not
      known what the tokens of one tokenizer stand for.
  """
  if max_pieces < 1:
    raise ValueError(f'max_pieces is {max_pieces}: feed at least 1 per token')
  there = lambda loaded: {
    i: token
    for i, token in token_bytes.from_tokenizer(loaded.tokenizer).items()
    if i < loaded.model.vocab_size
  }
  own, others = there(draft), there(target)
  target_vocab_size = target.model.vocab_size
  draft_ids = np.full(target_vocab_size, -1, np.int32)
  for i, j in _shared(own, others).items():
    draft_ids[i] = j
  num_shared = int(np.sum(draft_ids >= 0))
  if num_shared <= _LEAST_SHARE * min(len(own), len(others)):
    raise ValueError(
      f'the draft model has {len(own)} tokens and the target has '
      f'{len(others)}, but only {num_shared} of them stand for the same text, '
      'too few to draft with: use slem.generate, which drafts text and needs '
      'no shared tokens'
    )
  adds = lambda loaded: tuple(loaded.tokenizer.encode(''))
  bos = adds(target)
  spelled = _pieces(draft.tokenizer, own, others, draft_ids)
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
    kind=_kind(own, others, draft_ids, draft.model.vocab_size),
    draft_ids=draft_ids,
    pieces=pieces,
    prefix=() if bos else adds(draft),
    num_draft_tokens=len(own),
    num_target_tokens=len(others),
  )


def _shared(own, others) -> dict[int, int]:
  """Returns draft ids by target id; tokens of equal name are paired first."""
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
  # A text that is paired already is spelled by that pair.
  paired = {(others[i].text, others[i].is_control) for i in found}
  return found | {
    i: of_draft[key]
    for key, i in of_target.items()
    if key in of_draft and key not in paired
  }


def _pieces(draft, own, others, draft_ids):
  """Returns the pieces, by id, of the tokens that only the target has."""
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
