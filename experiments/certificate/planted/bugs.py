"""Known mistakes in speculative sampling, each with its detector.

A bug is caught if the detector raises an alarm on it, and none on the shipped
code.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax

from experiments.certificate.planted import budgets
from experiments.certificate.planted import choices
from experiments.certificate.planted import constraints
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
from specsample import sampling
from specsample import tree
from specsample import types
from specsample import verify
from specsample.drafters import Adaptive
from specsample.drafters import Chain
from specsample.drafters import Ngram
from specsample.drafters import TLI
from specsample.models.transformer import Transformer
from specsample.sampling import Sampling
from specsample.testing import cases
from specsample.testing.grammar import OneForbidden
from specsample.testing.hash_model import HashModel
from specsample.testing.sample import Group
from specsample.types import DraftKind


@dataclasses.dataclass(frozen=True)
class Bug:
  """A mistake, with one detector's readings with and without it."""

  name: str
  planted: Callable[[], Reading]
  shipped: Callable[[], Reading]


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
_GRAMMAR = OneForbidden(3)
_FORGETS_DRAFTS = Sampling(
  temperature=1.0, constraint=constraints.ForgetsDrafts(automaton=_GRAMMAR)
)
_PADDED = HashModel(vocab_size=4, padding=1)
_PADDED_CHAIN = Chain(
  model=dataclasses.replace(_PADDED, noise=0.6), num_draft_tokens=2
)
# Rejects often, and leaves several tokens to choose from.
_WIDE = HashModel(vocab_size=4)
_CONTRARY = Chain(
  model=dataclasses.replace(_WIDE, scale=-4.0), num_draft_tokens=1
)
# With fewer tokens left, the drafter still has one that the target lacks.
_TOP_2 = Sampling(temperature=1.0, top_k=2)
_COPY = Ngram(num_draft_tokens=2, min_ngram=1)
# Draws among the two most likely of three tokens, as DFlash 2 does.
_OF_TWO = drafters.Misdeclared(
  drafter=detectors.CHAIN, drawn=drafters.top_two, declared=drafters.top_two
)
# After a rejection, a row drafts only if the row beside it kept its draft.
_ONE_DRAFT = Chain(model=budgets.DRAFT, num_draft_tokens=1)
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


def _bug(name, detector, planted, shipped) -> Bug:
  """Returns a bug, given a detector and what its two versions differ in."""
  return Bug(
    name,
    functools.partial(detector, **planted),
    functools.partial(detector, **shipped),
  )


def _rule(name, verifier, shipped) -> Bug:
  return _bug(
    name,
    detectors.enumerated,
    {'verifier': verifier},
    {'verifier': shipped},
  )


def _noise(name, verifier) -> Bug:
  """Returns a rule that draws with noise which has drawn a token before."""
  return _bug(
    name,
    functools.partial(
      detectors.sampled,
      _ONE_PROMPT,
      model=_WIDE,
      reference=_WIDE,
      drafter=_CONTRARY,
      num_tokens=2,
    ),
    {'verifier': verifier},
    {'verifier': verify.chain},
  )


def _declared(
  name,
  drawn,
  declared,
  sampling=detectors.PLAIN,
  inner: types.Drafter = detectors.CHAIN,
) -> Bug:
  as_given = drafters.as_given
  version = lambda drawn, declared: {
    'drafter': drafters.Misdeclared(
      drafter=inner, drawn=drawn, declared=declared
    )
  }
  return _bug(
    name,
    functools.partial(
      detectors.enumerated, verifier=verify.chain, sampling=sampling
    ),
    version(drawn, declared),
    version(as_given, as_given),
  )


def _loop(name, groups, mistake, **both) -> Bug:
  marked = loop.Marked(vocab_size=3, mark=mistake.__name__)
  return _bug(
    name,
    functools.partial(detectors.sampled, groups, **both),
    {'mistake': mistake, 'model': marked},
    {},
  )


def _tree(name, topology, kind, mistake) -> Bug:
  """Returns a mistake in how the draft of a tree is handed over."""
  inner = detectors.tree(topology, kind)
  return _bug(
    name,
    functools.partial(detectors.enumerated, verify.tree),
    {'drafter': mistake(drafter=inner)},
    {'drafter': inner},
  )


def _scored_tree(name, model) -> Bug:
  """Returns a mistake in how the target scores a tree, or keeps its path."""
  return _bug(
    name,
    functools.partial(
      detectors.sampled,
      _ONE_PROMPT,
      drafter=detectors.tree(_BINARY, DraftKind.SAMPLED),
      verifier=verify.tree,
    ),
    {'model': model},
    {},
  )


def _filter(name, policy, mistake, inner=detectors.CHAIN, rule=verify.chain):
  """Returns a mistake in a policy: it decides by what it must not know."""
  version = lambda policy: {
    'drafter': Adaptive(drafter=inner, policies=(policy,))
  }
  return _bug(
    name,
    functools.partial(detectors.enumerated, rule),
    version(mistake),
    version(policy),
  )


def _either(name, mistake, rule=verify.chain) -> Bug:
  """Returns a mistake in how one of two drafts is chosen, or handed over."""
  return _bug(
    name,
    functools.partial(
      detectors.enumerated, rule, params=detectors.params_of_either
    ),
    {'drafter': mistake},
    {'drafter': detectors.EITHER},
  )


def _anticipating(name, policy) -> Bug:
  return _filter(name, policy, planted_policies.Anticipating(policy))


def _acceptance(name, scene, change) -> Bug:
  """Returns a mistake that leaves the law alone, but not what is kept."""
  return _bug(
    name,
    functools.partial(detectors.recomputed, scene),
    {'change': change},
    {},
  )


def _warp(name, mistake) -> Bug:
  """Returns a mistake that drafter and target share."""
  return _bug(
    name,
    detectors.warped,
    {'warp': mistake},
    {'warp': sampling.warp},
  )


def _recurrent(name, mistake) -> Bug:
  """Returns a mistake in how a recurrent state forgets rejected drafts."""
  return _bug(name, recurrent.rejected, {'mistake': mistake}, {})


_SIBLINGS = tree.k_ary((2,))
_BINARY = tree.Topology((0, 0, 1))


def _two_nodes(kind, policy) -> Adaptive:
  """Returns a drafter of trees that a policy cuts to two nodes."""
  return Adaptive(drafter=detectors.tree(_BINARY, kind), policies=(policy(2),))


_DFLASH = functools.partial(detectors.with_features, 'DFlash')

IN_WARP = (
  _warp('the bias added after the penalties', warps.bias_after_penalties),
  _warp(
    'the temperature applied after the filters',
    warps.temperature_after_filters,
  ),
  _warp('top-p before top-k', warps.top_p_before_top_k),
  _warp('min-p of the sum, not of the largest', warps.min_p_of_the_sum),
  _warp('a forbidden token among the k of top-k', warps.constraint_after_top_k),
  _warp(
    "presence and frequency penalties that count the prompt's tokens",
    warps.penalties_of_the_prompt,
  ),
  _warp(
    'a repetition penalty that overlooks the prompt',
    warps.repetitions_of_the_output,
  ),
)

IN_STATES = (
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
)

BUGS = (
  *IN_WARP,
  *IN_STATES,
  _noise(
    'shared noise between draft and residual',
    rules.SharedNoise(prompt_length=3),
  ),
  _noise(
    "noise of a rejected draft's position shared with the residual",
    rules.SharedPositionNoise(),
  ),
  _rule(
    'residual = p instead of (p - q)+', rules.PlainResidual(), verify.chain
  ),
  _rule(
    'token residual in block mode', rules.TokenResidualInBlock(), verify.block
  ),
  _rule(
    'stopping at the first failed h_i in block mode',
    rules.BlockStopsAtFirst(),
    verify.block,
  ),
  _rule(
    'an uncapped last ratio in block mode',
    rules.UncappedLastRatio(),
    verify.block,
  ),
  _bug(
    'a draft that the target never emits accepted at u = 0',
    functools.partial(detectors.enumerated, sampling=_TOP_2),
    {'verifier': rules.AcceptsAtZero()},
    {'verifier': verify.chain},
  ),
  _rule(
    'residual = softmax of (p - q)+', rules.SoftmaxResidual(), verify.chain
  ),
  _rule(
    'each draft verified by the logits before its own',
    rules.OneRowLate(),
    verify.chain,
  ),
  _rule(
    'the first draft kept unverified', rules.FirstUnverified(), verify.chain
  ),
  _rule(
    "the mask of a minimum length in the bonus token's row, too",
    rules.MasksOneRowMore(),
    verify.chain,
  ),
  _rule(
    'sampled drafts verified greedily', rules.GreedyIfSampled(), verify.chain
  ),
  _bug(
    'missing draft probabilities read as uniform',
    functools.partial(detectors.enumerated, verify.chain),
    {'drafter': drafters.MissingProbsAsUniform(drafter=_COPY, vocab_size=3)},
    {'drafter': _COPY},
  ),
  _declared(
    'temperature after top-p on one side',
    drafters.as_given,
    drafters.top_p_first(_TOP_P),
    _TOP_P,
  ),
  _declared(
    'q from raw logits with processed sampling',
    drafters.as_given,
    drafters.raw,
    _TOP_P,
  ),
  _declared(
    'a token sampled from bf16 logits and verified with float32 probabilities',
    drafters.from_bfloat16,
    drafters.as_given,
  ),
  _declared(
    'argmax drafts declared with a softmax law',
    drafters.argmax,
    drafters.as_given,
  ),
  _declared(
    'q cut by top-p and not renormalised',
    drafters.as_given,
    drafters.cut_without_renormalising(_TOP_P),
    _TOP_P,
  ),
  _declared(
    'a token drawn from few candidates declared with the whole softmax',
    drafters.top_two,
    drafters.as_given,
  ),
  _bug(
    'a residual of the tokens that the drafter could have drawn',
    functools.partial(detectors.enumerated, drafter=_OF_TWO),
    {'verifier': rules.ResidualOfCandidates()},
    {'verifier': verify.chain},
  ),
  _bug(
    'the candidates of the round before left in a reused buffer of q',
    functools.partial(detectors.sampled, _ONE_PROMPT),
    {'drafter': drafters.KeepsOldCandidates(drafter=_OF_TWO, vocab_size=3)},
    {'drafter': _OF_TWO},
  ),
  _bug(
    'q recomputed after the token before the one that was drafted',
    functools.partial(detectors.enumerated, verify.chain),
    {'drafter': drafters.DeclaredAfterOtherTokens(drafter=detectors.CHAIN)},
    {'drafter': detectors.CHAIN},
  ),
  _declared(
    'the mass of tokens that the target lacks left out, and q not renormalised',
    drafters.as_given,
    drafters.unnormalised,
    inner=_OTHER_VOCABULARY,
  ),
  _bug(
    'a drafted token left out for its own low probability',
    functools.partial(detectors.enumerated, verify.chain),
    {
      'drafter': drafters.CutsBeforeTheToken(
        drafter=detectors.CHAIN, threshold=0.3
      )
    },
    {'drafter': detectors.CHAIN},
  ),
  _bug(
    'a round without drafts because the drawn ones were unlikely',
    functools.partial(detectors.enumerated, verify.chain),
    {'drafter': drafters.DraftsIfLikely(drafter=detectors.CHAIN, least=0.5)},
    {'drafter': detectors.CHAIN},
  ),
  _either(
    'a remembered draft chosen because the drawn tokens were unlikely',
    drafters.ForgetsIfLikely(drafter=detectors.EITHER, least=0.5),
  ),
  _either(
    'remembered tokens declared with the law of the drawn ones',
    drafters.LeavesDrawnProbs(drafter=detectors.EITHER),
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
  _bug(
    'a tree of drawn tokens cut to the likeliest paths',
    functools.partial(detectors.enumerated, verify.tree),
    {'drafter': _two_nodes(DraftKind.SAMPLED, planted_policies.LikeliestDrawn)},
    {'drafter': _two_nodes(DraftKind.POINT_MASS, policies.TopNodes)},
  ),
  _bug(
    'a budget of drafts chosen after they were drawn',
    functools.partial(detectors.enumerated, verify.chain, model=budgets.TARGET),
    {'drafter': budgets.drafter(budgets.GlobalArgmax(costs=budgets.COSTS))},
    {'drafter': budgets.drafter(policies.EarlyStopping(costs=budgets.COSTS))},
  ),
  _bug(
    "a row's draft cut because of what the row beside it drew",
    functools.partial(
      detectors.paired, model=budgets.TARGET, draft_model=budgets.DRAFT
    ),
    {'drafter': drafters.CutByNeighbour(drafter=_ONE_DRAFT)},
    {'drafter': _OF_WHOLE_BATCH},
  ),
  _loop(
    'greedy rows mishandled in a mixed batch',
    _RAGGED,
    loop.greedy_decided_by_batch,
  ),
  _rule(
    'the bonus token drawn after a rejection',
    rules.BonusAfterRejection(),
    verify.chain,
  ),
  _bug(
    'the bonus token skipped on full acceptance',
    detectors.tokens_given_away,
    {'verifier': rules.SkippedBonus()},
    {'verifier': verify.chain},
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
  _bug(
    'one length for all rows of a ragged batch',
    functools.partial(detectors.sampled, _RAGGED),
    {'model': loop.OneLength(vocab_size=3)},
    {},
  ),
  _loop(
    'uniforms reused across rounds',
    _RAGGED,
    loop.reused_uniforms,
  ),
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
    drafter=drafters.UnknownTokens(drafter=detectors.CHAIN, unknown_id=3),
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
    drafter=detectors.tree(_BINARY, DraftKind.SAMPLED),
    verifier=verify.tree,
  ),
  _bug(
    'a constraint that does not follow the draft tokens',
    functools.partial(detectors.enumerated, verify.chain),
    {'sampling': _FORGETS_DRAFTS},
    {'sampling': cases.constrained_by(_GRAMMAR)},
  ),
  _bug(
    'probability on padded vocabulary',
    functools.partial(
      detectors.sampled,
      _ONE_PROMPT,
      reference=_PADDED,
      drafter=_PADDED_CHAIN,
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
    trees.BeamAsSample,
  ),
  _bug(
    'the best paths of a lattice treated as samples',
    functools.partial(
      detectors.sampled, _ONE_PROMPT, verifier=verify.tree, num_tokens=3
    ),
    {'drafter': trees.LatticeAsSample(drafter=trees.LATTICE_TREE)},
    {'drafter': trees.LATTICE_TREE},
  ),
  _tree(
    'siblings without replacement verified as independent ones',
    _SIBLINGS,
    DraftKind.WITHOUT_REPLACEMENT,
    trees.SecondAsTheFirst,
  ),
  _tree(
    'sampled siblings reranked by their probability',
    _SIBLINGS,
    DraftKind.SAMPLED,
    trees.LikelierFirst,
  ),
  _bug(
    'one residual for all siblings',
    functools.partial(
      detectors.enumerated,
      drafter=detectors.tree(_BINARY, DraftKind.SAMPLED),
    ),
    {'verifier': trees.SameResidual()},
    {'verifier': verify.tree},
  ),
  _bug(
    'a new draw from the target for each sibling',
    functools.partial(
      detectors.enumerated,
      drafter=detectors.tree(_BINARY, DraftKind.POINT_MASS),
    ),
    {'verifier': trees.DrawsForEachChild()},
    {'verifier': verify.tree},
  ),
  _bug(
    'later siblings never tried',
    detectors.nodes_given_away,
    {'verifier': trees.OnlyFirstSiblings()},
    {'verifier': verify.tree},
  ),
  _bug(
    'weights updated between the draw of a draft and its verdict',
    online.sampled,
    {'is_mistaken': True},
    {'is_mistaken': False},
  ),
  _bug(
    'log-probabilities of the policy before its last step',
    rollouts.recomputed,
    {'change': rollouts.of_the_policy_before},
    {'change': rollouts.as_drawn},
  ),
  _bug(
    'log-probabilities before warping passed as those after it',
    rollouts.recomputed,
    {'change': rollouts.before_warping},
    {'change': rollouts.as_drawn},
  ),
  _bug(
    "a history that holds the row's own future",
    rollouts.remembering,
    {'key_of': rollouts.same_key},
    {'key_of': jax.random.fold_in},
  ),
  _bug(
    'remembered drafts declared with their frequency in the history',
    rollouts.enumerated,
    {'change': rollouts.frequency_as_law},
    {'change': rollouts.as_given},
  ),
  _bug(
    'a bound on a logit without the length of the hidden vector',
    functools.partial(choices.missed_bounds, 'normal, float32'),
    {'model': choices.NoNorm},
    {'model': Transformer},
  ),
  _bug(
    'a bound on a logit without the rounding of its product',
    functools.partial(choices.missed_bounds, 'integers, float32'),
    {'model': choices.NoSlack},
    {'model': Transformer},
  ),
  _bug(
    'a choice among few tokens where others may be better',
    functools.partial(choices.wrong_choices, 'groups of 320, float32'),
    {'model': choices.NoFallback},
    {'model': Transformer},
  ),
)
