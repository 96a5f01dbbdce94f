"""Known mistakes in speculative sampling, each with its detector.

A bug is caught if the detector raises an alarm on it, and none on the shipped
code.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from experiments.certificate.planted import choices
from experiments.certificate.planted import detectors
from experiments.certificate.planted import drafters
from experiments.certificate.planted import loop
from experiments.certificate.planted import online
from experiments.certificate.planted import policies as planted_policies
from experiments.certificate.planted import recurrent
from experiments.certificate.planted import rollouts
from experiments.certificate.planted import rules
from experiments.certificate.planted import trees
from experiments.certificate.planted import warps
from experiments.certificate.planted.detectors import Reading
from specsample import policies
from specsample import tree
from specsample import verify
from specsample.drafters import Adaptive
from specsample.drafters import Chain
from specsample.drafters import Ngram
from specsample.drafters import TLI
from specsample.sampling import Sampling
from specsample.testing import cases
from specsample.testing.grammar import OneForbidden
from specsample.testing.hash_model import HashModel
from specsample.testing.sample import Group
from specsample.types import DraftKind


@dataclasses.dataclass(frozen=True)
class Bug:
  """A mistake, and the detector that is run with and without it.

  Attributes:
    name: as the certificate has it.
    detector: returns a reading; what it takes besides the mistake is bound.
    mistake: the arguments of the version with the mistake.
    correct: those of the shipped version, if they are not the defaults.
  """

  name: str
  detector: Callable[..., Reading]
  mistake: Mapping[str, Any]
  correct: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def planted(self) -> Reading:
    """Returns the reading with the mistake."""
    return self.detector(**self.mistake)

  def shipped(self) -> Reading:
    """Returns the reading of the shipped code."""
    return self.detector(**self.correct)


_ONE_PROMPT = (Group((1, 0, 1), detectors.PLAIN),)
_RAGGED = (
  *_ONE_PROMPT,
  Group((0, 1, 2, 2, 0), Sampling(temperature=0.6, top_k=2)),
  Group((2, 1), Sampling(temperature=0.0)),
)
_PENALISED = (
  Group(
    (1, 0, 1),
    Sampling(temperature=1.0, repetition_penalty=1.5, frequency_penalty=1.0),
  ),
)
_TOP_P = Sampling(temperature=0.5, top_p=0.8)
# With fewer tokens left, the drafter still has one that the target lacks.
_TOP_2 = Sampling(temperature=1.0, top_k=2)
_GRAMMAR = OneForbidden(3)
_PADDED = HashModel(vocab_size=4, padding=1)
# Rejects often, and leaves several tokens to choose from.
_WIDE = HashModel(vocab_size=4)
_CONTRARY = Chain(
  model=dataclasses.replace(_WIDE, scale=-4.0), num_draft_tokens=1
)
_COPY = Ngram(num_draft_tokens=2, min_ngram=1)
# Draws among the two most likely of three tokens, as DFlash 2 does.
_OF_TWO = drafters.Misdeclared(
  drafter=detectors.CHAIN, drawn=drafters.top_two, declared=drafters.top_two
)
# After a rejection, a row drafts only if the row beside it kept its draft.
_ONE_DRAFT = Chain(model=planted_policies.DRAFT, num_draft_tokens=1)
_OF_WHOLE_BATCH = Adaptive(
  drafter=_ONE_DRAFT,
  policies=(
    policies.Fastest(
      costs=(1.0, 1.3), strength=0.5, patience=1, whole_batch=True
    ),
  ),
)
_OTHER_VOCABULARY = TLI(
  model=drafters.LogProbs(vocab_size=4, noise=0.5),
  vocab_size=3,
  num_draft_tokens=2,
)
_SIBLINGS = tree.k_ary((2,))
_BINARY = tree.Topology((0, 0, 1))
_SAMPLED_TREE = detectors.tree(_BINARY, DraftKind.SAMPLED)
_DFLASH = functools.partial(detectors.with_features, 'DFlash')

_of_either = functools.partial(
  detectors.enumerated, params=detectors.params_of_either
)
_of_budget = functools.partial(
  detectors.enumerated, model=planted_policies.TARGET
)


def _rule(name, law, shipped=verify.chain, detector=detectors.enumerated):
  """Returns a rule that decides by a mistaken law."""
  kinds = shipped.draft_kinds
  mistaken = rules.Rule(law=law, draft_kinds=kinds)
  return Bug(name, detector, {'verifier': mistaken}, {'verifier': shipped})


def _noise(name, verifier):
  """Returns a rule that draws with noise which has drawn a token before."""
  detector = functools.partial(
    detectors.sampled,
    _ONE_PROMPT,
    model=_WIDE,
    reference=_WIDE,
    drafter=_CONTRARY,
    num_tokens=2,
  )
  return Bug(name, detector, {'verifier': verifier})


def _drafter(
  name, mistaken, shipped=detectors.CHAIN, detector=detectors.enumerated
):
  """Returns a drafter with a mistake."""
  return Bug(name, detector, {'drafter': mistaken}, {'drafter': shipped})


def _draft(name, change, inner=detectors.CHAIN, rule=verify.chain):
  """Returns a drafter whose draft is changed before it is handed over."""
  detector = functools.partial(detectors.enumerated, rule)
  changed = drafters.Changed(drafter=inner, change=change)
  return _drafter(name, changed, inner, detector)


def _declared(name, inner=detectors.CHAIN, sampling=detectors.PLAIN, **rewarps):
  """Returns a drafter that draws from another law than it declares."""
  version = functools.partial(drafters.Misdeclared, drafter=inner)
  detector = functools.partial(detectors.enumerated, sampling=sampling)
  return _drafter(name, version(**rewarps), version(), detector)


def _loop(name, groups, mistake, **both):
  detector = functools.partial(detectors.sampled, groups, **both)
  marked = loop.Marked(vocab_size=3, mark=mistake.__name__)
  return Bug(name, detector, {'mistake': mistake, 'model': marked})


def _tree(name, topology, kind, change):
  """Returns a mistake in how the draft of a tree is handed over."""
  change = functools.partial(change, topology)
  return _draft(name, change, detectors.tree(topology, kind), verify.tree)


def _scored_tree(name, model):
  """Returns a mistake in how the target scores a tree, or keeps its path."""
  detector = functools.partial(
    detectors.sampled, _ONE_PROMPT, drafter=_SAMPLED_TREE, verifier=verify.tree
  )
  return Bug(name, detector, {'model': model})


def _filter(name, policy, mistake, inner=detectors.CHAIN, rule=verify.chain):
  """Returns a mistake in a policy: it decides by what it must not know."""
  version = lambda policy: Adaptive(drafter=inner, policies=(policy,))
  detector = functools.partial(detectors.enumerated, rule)
  return _drafter(name, version(mistake), version(policy), detector)


def _anticipating(name, policy):
  return _filter(name, policy, planted_policies.Anticipating(policy))


def _acceptance(name, scene, change):
  """Returns a mistake that leaves the law alone, but not what is kept."""
  detector = functools.partial(detectors.recomputed, scene)
  return Bug(name, detector, {'change': change})


def _recurrent(name, mistake):
  """Returns a mistake in how a recurrent state forgets rejected drafts."""
  return Bug(name, recurrent.rejected, {'mistake': mistake})


def _two_nodes(kind, policy):
  """Returns a drafter of trees that a policy cuts to two nodes."""
  return Adaptive(drafter=detectors.tree(_BINARY, kind), policies=(policy(2),))


# Mistakes that drafter and target share.
IN_WARP = tuple(
  Bug(name, detectors.warped, {'warp': mistake})
  for name, mistake in (
    ('the bias added after the penalties', warps.bias_after_penalties),
    (
      'the temperature applied after the filters',
      warps.temperature_after_filters,
    ),
    ('top-p before top-k', warps.top_p_before_top_k),
    ('min-p of the sum, not of the largest', warps.min_p_of_the_sum),
    (
      'a forbidden token among the k of top-k',
      warps.constraint_after_top_k,
    ),
    (
      "presence and frequency penalties that count the prompt's tokens",
      warps.penalties_of_the_prompt,
    ),
    (
      'a repetition penalty that overlooks the prompt',
      warps.repetitions_of_the_output,
    ),
  )
)

BUGS = (
  *IN_WARP,
  _recurrent(
    'rejected drafts left in a recurrent state',
    recurrent.keeps_all_in_the_state,
  ),
  _recurrent(
    "rejected drafts left in a convolution's tail",
    recurrent.keeps_all_in_the_tail,
  ),
  _recurrent(
    'a recurrent state that always keeps the pending token',
    recurrent.keeps_at_least_one,
  ),
  _recurrent(
    'a recurrent state rolled forward by at most three tokens',
    recurrent.keeps_at_most_three,
  ),
  _recurrent(
    'the old state read after a round that kept no draft',
    recurrent.stale_without_drafts,
  ),
  _recurrent(
    'the log of the row beside folded into a recurrent state',
    recurrent.logs_of_the_row_beside,
  ),
  _recurrent(
    "a tree's first nodes folded into a recurrent state",
    recurrent.first_nodes,
  ),
  _recurrent(
    'a recurrent state that passes through the siblings of a node',
    recurrent.sees_siblings,
  ),
  _recurrent('a recurrent state rounded to bfloat16', recurrent.rounded_state),
  _noise(
    'shared noise between draft and residual',
    rules.SharedNoise(prompt_length=3),
  ),
  _noise(
    "noise of a rejected draft's position shared with the residual",
    rules.SharedPositionNoise(),
  ),
  _rule('residual = p instead of (p - q)+', rules.plain_residual),
  _rule(
    'token residual in block mode', rules.token_residual_in_block, verify.block
  ),
  _rule(
    'stopping at the first failed h_i in block mode',
    rules.block_stops_at_first,
    verify.block,
  ),
  _rule(
    'an uncapped last ratio in block mode',
    rules.uncapped_last_ratio,
    verify.block,
  ),
  _rule(
    'a draft that the target never emits accepted at u = 0',
    rules.accepts_at_zero,
    detector=functools.partial(detectors.enumerated, sampling=_TOP_2),
  ),
  _rule('residual = softmax of (p - q)+', rules.softmax_residual),
  _rule('each draft verified by the logits before its own', rules.one_row_late),
  _rule('the first draft kept unverified', rules.first_unverified),
  _rule(
    "the mask of a minimum length in the bonus token's row, too",
    rules.masks_one_row_more,
  ),
  _rule('sampled drafts verified greedily', rules.greedy_if_sampled),
  _draft(
    'missing draft probabilities read as uniform',
    drafters.missing_probs_as_uniform,
    _COPY,
  ),
  _declared(
    'temperature after top-p on one side',
    declared=drafters.top_p_first(_TOP_P),
    sampling=_TOP_P,
  ),
  _declared(
    'q from raw logits with processed sampling',
    declared=drafters.raw,
    sampling=_TOP_P,
  ),
  _declared(
    'a token sampled from bf16 logits and verified with float32 probabilities',
    drawn=drafters.from_bfloat16,
  ),
  _declared('argmax drafts declared with a softmax law', drawn=drafters.argmax),
  _declared(
    'q cut by top-p and not renormalised',
    declared=drafters.cut_without_renormalising(_TOP_P),
    sampling=_TOP_P,
  ),
  _declared(
    'a token drawn from few candidates declared with the whole softmax',
    drawn=drafters.top_two,
  ),
  _rule(
    'a residual of the tokens that the drafter could have drawn',
    rules.residual_of_candidates,
    detector=functools.partial(detectors.enumerated, drafter=_OF_TWO),
  ),
  _drafter(
    'the candidates of the round before left in a reused buffer of q',
    drafters.KeepsOldCandidates(drafter=_OF_TWO, vocab_size=3),
    _OF_TWO,
    functools.partial(detectors.sampled, _ONE_PROMPT),
  ),
  _drafter(
    'q recomputed after the token before the one that was drafted',
    drafters.DeclaredAfterOtherTokens(drafter=detectors.CHAIN),
  ),
  _declared(
    'the mass of tokens that the target lacks left out, and q not renormalised',
    declared=drafters.unnormalised,
    inner=_OTHER_VOCABULARY,
  ),
  _draft(
    'a drafted token left out for its own low probability',
    drafters.cut_before_the_token,
  ),
  _draft(
    'a round without drafts because the drawn ones were unlikely',
    drafters.drafted_if_likely,
  ),
  _drafter(
    'a remembered draft chosen because the drawn tokens were unlikely',
    drafters.ForgetsIfLikely(drafter=detectors.EITHER),
    detectors.EITHER,
    _of_either,
  ),
  _drafter(
    'remembered tokens declared with the law of the drawn ones',
    drafters.LeavesDrawnProbs(drafter=detectors.EITHER),
    detectors.EITHER,
    _of_either,
  ),
  _anticipating(
    'a filter by the probability of the token that it leaves out',
    policies.TokenProbability(0.3),
  ),
  _anticipating(
    'a filter by the probability of a path up to the token it leaves out',
    policies.PathProbability(0.2),
  ),
  _anticipating(
    'a filter by the rank of the token that it leaves out', policies.TopK(1)
  ),
  _filter(
    'siblings that were drawn pruned to the likeliest',
    policies.TokenProbability(0.4),
    planted_policies.LikeliestDrawn(1),
    inner=detectors.tree(_SIBLINGS, DraftKind.SAMPLED),
    rule=verify.tree,
  ),
  _drafter(
    'a tree of drawn tokens cut to the likeliest paths',
    _two_nodes(DraftKind.SAMPLED, planted_policies.LikeliestDrawn),
    _two_nodes(DraftKind.POINT_MASS, policies.TopNodes),
    functools.partial(detectors.enumerated, verify.tree),
  ),
  _drafter(
    'a budget of drafts chosen after they were drawn',
    planted_policies.drafter(
      planted_policies.GlobalArgmax(costs=planted_policies.COSTS)
    ),
    planted_policies.drafter(
      policies.EarlyStopping(costs=planted_policies.COSTS)
    ),
    _of_budget,
  ),
  _drafter(
    "a row's draft cut because of what the row beside it drew",
    drafters.Changed(drafter=_ONE_DRAFT, change=drafters.cut_by_neighbour),
    _OF_WHOLE_BATCH,
    functools.partial(
      detectors.paired,
      model=planted_policies.TARGET,
      draft_model=planted_policies.DRAFT,
    ),
  ),
  _loop(
    'greedy rows mishandled in a mixed batch',
    _RAGGED,
    loop.greedy_decided_by_batch,
  ),
  _rule('the bonus token drawn after a rejection', rules.bonus_after_rejection),
  _rule(
    'the bonus token skipped on full acceptance',
    rules.skipped_bonus,
    detector=detectors.tokens_given_away,
  ),
  _acceptance(
    "the drafter's cache missing the last accepted token",
    functools.partial(detectors.untrained, detectors.CHAIN),
    lambda drafter: drafters.ForgetsLastAccepted(drafter=drafter),
  ),
  _acceptance(
    "rejected drafts left in the drafter's cache",
    _DFLASH,
    lambda drafter: drafters.KeepsRejected(drafter=drafter),
  ),
  _acceptance('features taken one layer off', _DFLASH, drafters.one_layer_off),
  _acceptance(
    'a block that sees an entry left by a rejected draft',
    _DFLASH,
    drafters.sees_one_entry_more,
  ),
  _acceptance(
    'drafts looked up in tokens that were drafted and rejected',
    functools.partial(detectors.untrained, _COPY),
    lambda drafter: drafters.RemembersDrafts(drafter=drafter),
  ),
  Bug(
    'one length for all rows of a ragged batch',
    functools.partial(detectors.sampled, _RAGGED),
    {'model': loop.OneLength(vocab_size=3)},
  ),
  _loop('uniforms reused across rounds', _RAGGED, loop.reused_uniforms),
  _loop(
    'tokens after an EOS inside an accepted run',
    _RAGGED,
    loop.stops_at_the_last_token_only,
    eos_id=2,
  ),
  _loop(
    'a draft that the vocabulary ends before read as its last token',
    _ONE_PROMPT,
    loop.drafts_of_unknown_tokens,
    drafter=drafters.Changed(
      drafter=detectors.CHAIN, change=drafters.unknown_tokens
    ),
  ),
  _loop(
    'penalties updated once a round instead of once a token',
    _PENALISED,
    loop.penalties_once_a_round,
  ),
  _loop(
    'penalties count nodes that are not on the path',
    _PENALISED,
    loop.penalties_of_all_nodes,
    drafter=_SAMPLED_TREE,
    verifier=verify.tree,
  ),
  Bug(
    'a constraint that does not follow the draft tokens',
    detectors.enumerated,
    {
      'sampling': Sampling(
        temperature=1.0, constraint=warps.ForgetsDrafts(automaton=_GRAMMAR)
      )
    },
    {'sampling': cases.constrained_by(_GRAMMAR)},
  ),
  Bug(
    'probability on padded vocabulary',
    functools.partial(
      detectors.sampled,
      _ONE_PROMPT,
      reference=_PADDED,
      drafter=Chain(
        model=dataclasses.replace(_PADDED, noise=0.6), num_draft_tokens=2
      ),
    ),
    {'model': dataclasses.replace(_PADDED, padding=0)},
    {'model': _PADDED},
  ),
  _scored_tree(
    'a tree mask through which a node sees its sibling',
    trees.SeesSiblings(vocab_size=3),
  ),
  _scored_tree(
    'an accepted path left where its nodes were, not moved into place',
    trees.KeepsTheFirstNodes(vocab_size=3),
  ),
  _tree(
    'beam candidates treated as samples',
    _SIBLINGS,
    DraftKind.SAMPLED,
    trees.beam_as_sample,
  ),
  _drafter(
    'the best paths of a lattice treated as samples',
    trees.LatticeAsSample(drafter=trees.LATTICE_TREE),
    trees.LATTICE_TREE,
    functools.partial(
      detectors.sampled, _ONE_PROMPT, verifier=verify.tree, num_tokens=3
    ),
  ),
  _tree(
    'siblings without replacement verified as independent ones',
    _SIBLINGS,
    DraftKind.WITHOUT_REPLACEMENT,
    trees.second_as_the_first,
  ),
  _tree(
    'sampled siblings reranked by their probability',
    _SIBLINGS,
    DraftKind.SAMPLED,
    trees.likelier_first,
  ),
  _rule(
    'one residual for all siblings',
    trees.same_residual,
    verify.tree,
    functools.partial(detectors.enumerated, drafter=_SAMPLED_TREE),
  ),
  _rule(
    'a new draw from the target for each sibling',
    trees.draws_for_each_child,
    verify.tree,
    functools.partial(
      detectors.enumerated,
      drafter=detectors.tree(_BINARY, DraftKind.POINT_MASS),
    ),
  ),
  _rule(
    'later siblings never tried',
    trees.only_first_siblings,
    verify.tree,
    detectors.nodes_given_away,
  ),
  Bug(
    'weights updated between the draw of a draft and its verdict',
    online.sampled,
    {'is_mistaken': True},
  ),
  Bug(
    'log-probabilities of the policy before its last step',
    rollouts.recomputed,
    {'change': rollouts.of_the_policy_before},
  ),
  Bug(
    'log-probabilities before warping passed as those after it',
    rollouts.recomputed,
    {'change': rollouts.before_warping},
  ),
  Bug(
    "a history that holds the row's own future",
    rollouts.remembering,
    {'have_same_key': True},
  ),
  Bug(
    'remembered drafts declared with their frequency in the history',
    rollouts.enumerated,
    {'change': rollouts.frequency_as_law},
  ),
  Bug(
    'a bound on a logit without the length of the hidden vector',
    functools.partial(choices.missed_bounds, 'normal, float32'),
    {'model': choices.NoNorm},
  ),
  Bug(
    'a bound on a logit without the rounding of its product',
    functools.partial(choices.missed_bounds, 'integers, float32'),
    {'model': choices.NoSlack},
  ),
  Bug(
    'a choice among few tokens where others may be better',
    functools.partial(choices.wrong_choices, 'groups of 320, float32'),
    {'model': choices.NoFallback},
  ),
)
