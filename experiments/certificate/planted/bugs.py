"""Known mistakes in speculative sampling, each with its detector.

A bug is caught if the detector raises an alarm on it, and none on the shipped
code.
"""

import dataclasses
import functools

from experiments.certificate.planted import bug
from experiments.certificate.planted import choices
from experiments.certificate.planted import detectors
from experiments.certificate.planted import drafters
from experiments.certificate.planted import loop
from experiments.certificate.planted import policies as planted_policies
from experiments.certificate.planted import recurrent
from experiments.certificate.planted import rollouts
from experiments.certificate.planted import rules
from experiments.certificate.planted import trees
from experiments.certificate.planted import warps
from specsample import policies
from specsample import tree
from specsample import verify
from specsample.drafters import Adaptive
from specsample.drafters import Chain
from specsample.drafters import Ngram
from specsample.drafters import TLI
from specsample.sampling import Sampling
from specsample.testing import cases
from specsample.testing import trained
from specsample.testing.grammar import OneForbidden
from specsample.testing.hash_model import HashModel
from specsample.testing.sample import Group
from specsample.types import DraftKind

_RAGGED = (
  *bug.ONE_PROMPT,
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
_DFLASH = functools.partial(detectors.with_features, 'DFlash')

_of_either = functools.partial(
  detectors.enumerated, params=detectors.params_of_either
)
_of_budget = functools.partial(
  detectors.enumerated, model=planted_policies.TARGET
)


# Mistakes that drafter and target share.
IN_WARP = tuple(
  bug.Bug(name, detectors.warped, {'warp': mistake})
  for name, mistake in warps.MISTAKES.items()
)

BUGS = (
  *IN_WARP,
  *(
    bug.Bug(name, recurrent.rejected, {'mistake': mistake})
    for name, mistake in recurrent.MISTAKES.items()
  ),
  bug.of_noise(
    'shared noise between draft and residual',
    rules.SharedNoise(prompt_length=3),
  ),
  bug.of_noise(
    "noise of a rejected draft's position shared with the residual",
    rules.SharedPositionNoise(),
  ),
  bug.of_rule('residual = p instead of (p - q)+', rules.plain_residual),
  bug.of_rule(
    'token residual in block mode', rules.token_residual_in_block, verify.block
  ),
  bug.of_rule(
    'stopping at the first failed h_i in block mode',
    rules.block_stops_at_first,
    verify.block,
  ),
  bug.of_rule(
    'an uncapped last ratio in block mode',
    rules.uncapped_last_ratio,
    verify.block,
  ),
  bug.of_rule(
    'a draft that the target never emits accepted at u = 0',
    rules.accepts_at_zero,
    detector=functools.partial(detectors.enumerated, sampling=_TOP_2),
  ),
  bug.of_rule('residual = softmax of (p - q)+', rules.softmax_residual),
  bug.of_rule(
    'each draft verified by the logits before its own', rules.one_row_late
  ),
  bug.of_rule('the first draft kept unverified', rules.first_unverified),
  bug.of_rule(
    "the mask of a minimum length in the bonus token's row, too",
    rules.masks_one_row_more,
  ),
  bug.of_rule('sampled drafts verified greedily', rules.greedy_if_sampled),
  bug.of_draft(
    'missing draft probabilities read as uniform',
    drafters.missing_probs_as_uniform,
    _COPY,
  ),
  bug.of_declared_law(
    'temperature after top-p on one side',
    declared=drafters.top_p_first(_TOP_P),
    sampling=_TOP_P,
  ),
  bug.of_declared_law(
    'q from raw logits with processed sampling',
    declared=drafters.raw,
    sampling=_TOP_P,
  ),
  bug.of_declared_law(
    'a token sampled from bf16 logits and verified with float32 probabilities',
    drawn=drafters.from_bfloat16,
  ),
  bug.of_declared_law(
    'argmax drafts declared with a softmax law', drawn=drafters.argmax
  ),
  bug.of_declared_law(
    'q cut by top-p and not renormalised',
    declared=drafters.cut_without_renormalising(_TOP_P),
    sampling=_TOP_P,
  ),
  bug.of_declared_law(
    'a token drawn from few candidates declared with the whole softmax',
    drawn=drafters.top_two,
  ),
  bug.of_rule(
    'a residual of the tokens that the drafter could have drawn',
    rules.residual_of_candidates,
    detector=functools.partial(detectors.enumerated, drafter=_OF_TWO),
  ),
  bug.of_drafter(
    'the candidates of the round before left in a reused buffer of q',
    drafters.KeepsOldCandidates(drafter=_OF_TWO, vocab_size=3),
    _OF_TWO,
    functools.partial(detectors.sampled, bug.ONE_PROMPT),
  ),
  bug.of_drafter(
    'q recomputed after the token before the one that was drafted',
    drafters.DeclaredAfterOtherTokens(drafter=detectors.CHAIN),
  ),
  bug.of_declared_law(
    'the mass of tokens that the target lacks left out, and q not renormalised',
    declared=drafters.unnormalised,
    inner=_OTHER_VOCABULARY,
  ),
  bug.of_draft(
    'a drafted token left out for its own low probability',
    drafters.cut_before_the_token,
  ),
  bug.of_draft(
    'a round without drafts because the drawn ones were unlikely',
    drafters.drafted_if_likely,
  ),
  bug.of_drafter(
    'a remembered draft chosen because the drawn tokens were unlikely',
    drafters.ForgetsIfLikely(drafter=detectors.EITHER),
    detectors.EITHER,
    _of_either,
  ),
  bug.of_drafter(
    'remembered tokens declared with the law of the drawn ones',
    drafters.LeavesDrawnProbs(drafter=detectors.EITHER),
    detectors.EITHER,
    _of_either,
  ),
  bug.of_anticipation(
    'a filter by the probability of the token that it leaves out',
    policies.TokenProbability(0.3),
  ),
  bug.of_anticipation(
    'a filter by the probability of a path up to the token it leaves out',
    policies.PathProbability(0.2),
  ),
  bug.of_anticipation(
    'a filter by the rank of the token that it leaves out', policies.TopK(1)
  ),
  bug.of_policy(
    'siblings that were drawn pruned to the likeliest',
    policies.TokenProbability(0.4),
    planted_policies.LikeliestDrawn(1),
    inner=detectors.tree(_SIBLINGS, DraftKind.SAMPLED),
    rule=verify.tree,
  ),
  bug.of_drafter(
    'a tree of drawn tokens cut to the likeliest paths',
    bug.two_nodes(DraftKind.SAMPLED, planted_policies.LikeliestDrawn),
    bug.two_nodes(DraftKind.POINT_MASS, policies.TopNodes),
    functools.partial(detectors.enumerated, verify.tree),
  ),
  bug.of_drafter(
    'a budget of drafts chosen after they were drawn',
    planted_policies.drafter(
      planted_policies.GlobalArgmax(costs=planted_policies.COSTS)
    ),
    planted_policies.drafter(
      policies.EarlyStopping(costs=planted_policies.COSTS)
    ),
    _of_budget,
  ),
  bug.of_drafter(
    "a row's draft cut because of what the row beside it drew",
    drafters.Changed(drafter=_ONE_DRAFT, change=drafters.cut_by_neighbour),
    _OF_WHOLE_BATCH,
    functools.partial(
      detectors.paired,
      model=planted_policies.TARGET,
      draft_model=planted_policies.DRAFT,
    ),
  ),
  bug.of_loop(
    'greedy rows mishandled in a mixed batch',
    _RAGGED,
    loop.greedy_decided_by_batch,
  ),
  bug.of_rule(
    'the bonus token drawn after a rejection', rules.bonus_after_rejection
  ),
  bug.of_rule(
    'the bonus token skipped on full acceptance',
    rules.skipped_bonus,
    detector=detectors.given_away,
  ),
  bug.of_acceptance(
    "the drafter's cache missing the last accepted token",
    functools.partial(trained.untrained, detectors.MODEL, detectors.CHAIN),
    lambda drafter: drafters.ForgetsLastAccepted(drafter=drafter),
  ),
  bug.of_acceptance(
    "rejected drafts left in the drafter's cache",
    _DFLASH,
    lambda drafter: drafters.KeepsRejected(drafter=drafter),
  ),
  bug.of_acceptance(
    'features taken one layer off', _DFLASH, drafters.one_layer_off
  ),
  bug.of_acceptance(
    'a block that sees an entry left by a rejected draft',
    _DFLASH,
    drafters.sees_one_entry_more,
  ),
  bug.of_acceptance(
    'drafts looked up in tokens that were drafted and rejected',
    functools.partial(trained.untrained, detectors.MODEL, _COPY),
    lambda drafter: drafters.RemembersDrafts(drafter=drafter),
  ),
  bug.Bug(
    'one length for all rows of a ragged batch',
    functools.partial(detectors.sampled, _RAGGED),
    {'model': loop.OneLength(vocab_size=3)},
  ),
  bug.of_loop('uniforms reused across rounds', _RAGGED, loop.reused_uniforms),
  bug.of_loop(
    'tokens after an EOS inside an accepted run',
    _RAGGED,
    loop.stops_at_the_last_token_only,
    eos_id=2,
  ),
  bug.of_loop(
    'a draft that the vocabulary ends before read as its last token',
    bug.ONE_PROMPT,
    loop.drafts_of_unknown_tokens,
    drafter=drafters.Changed(
      drafter=detectors.CHAIN, change=drafters.unknown_tokens
    ),
  ),
  bug.of_loop(
    'penalties updated once a round instead of once a token',
    _PENALISED,
    loop.penalties_once_a_round,
  ),
  bug.of_loop(
    'penalties count nodes that are not on the path',
    _PENALISED,
    loop.penalties_of_all_nodes,
    drafter=bug.SAMPLED_TREE,
    verifier=verify.tree,
  ),
  bug.Bug(
    'a constraint that does not follow the draft tokens',
    detectors.enumerated,
    {
      'sampling': Sampling(
        temperature=1.0, constraint=warps.ForgetsDrafts(automaton=_GRAMMAR)
      )
    },
    {'sampling': cases.constrained_by(_GRAMMAR)},
  ),
  bug.Bug(
    'probability on padded vocabulary',
    functools.partial(
      detectors.sampled,
      bug.ONE_PROMPT,
      reference=_PADDED,
      drafter=Chain(
        model=dataclasses.replace(_PADDED, noise=0.6), num_draft_tokens=2
      ),
    ),
    {'model': dataclasses.replace(_PADDED, padding=0)},
    {'model': _PADDED},
  ),
  bug.of_scored_tree(
    'a tree mask through which a node sees its sibling',
    trees.SeesSiblings(vocab_size=3),
  ),
  bug.of_scored_tree(
    'an accepted path left where its nodes were, not moved into place',
    trees.KeepsTheFirstNodes(vocab_size=3),
  ),
  bug.of_tree(
    'beam candidates treated as samples',
    _SIBLINGS,
    DraftKind.SAMPLED,
    trees.beam_as_sample,
  ),
  bug.of_drafter(
    'the best paths of a lattice treated as samples',
    trees.LatticeAsSample(drafter=trees.LATTICE_TREE),
    trees.LATTICE_TREE,
    functools.partial(
      detectors.sampled, bug.ONE_PROMPT, verifier=verify.tree, num_tokens=3
    ),
  ),
  bug.of_tree(
    'siblings without replacement verified as independent ones',
    _SIBLINGS,
    DraftKind.WITHOUT_REPLACEMENT,
    trees.second_as_the_first,
  ),
  bug.of_tree(
    'sampled siblings reranked by their probability',
    _SIBLINGS,
    DraftKind.SAMPLED,
    trees.likelier_first,
  ),
  bug.of_rule(
    'one residual for all siblings',
    trees.same_residual,
    verify.tree,
    functools.partial(detectors.enumerated, drafter=bug.SAMPLED_TREE),
  ),
  bug.of_rule(
    'a new draw from the target for each sibling',
    trees.draws_for_each_child,
    verify.tree,
    functools.partial(
      detectors.enumerated,
      drafter=detectors.tree(bug.BINARY, DraftKind.POINT_MASS),
    ),
  ),
  bug.of_rule(
    'later siblings never tried',
    trees.only_first_siblings,
    verify.tree,
    functools.partial(detectors.given_away, topology=bug.BINARY),
  ),
  bug.Bug(
    'weights updated between the draw of a draft and its verdict',
    rollouts.learning,
    {'is_mistaken': True},
  ),
  bug.Bug(
    'log-probabilities of the policy before its last step',
    rollouts.recomputed,
    {'change': rollouts.of_the_policy_before},
  ),
  bug.Bug(
    'log-probabilities before warping passed as those after it',
    rollouts.recomputed,
    {'change': rollouts.before_warping},
  ),
  bug.Bug(
    "a history that holds the row's own future",
    rollouts.remembering,
    {'have_same_key': True},
  ),
  bug.Bug(
    'remembered drafts declared with their frequency in the history',
    rollouts.enumerated,
    {'change': rollouts.frequency_as_law},
  ),
  bug.Bug(
    'a bound on a logit without the length of the hidden vector',
    functools.partial(choices.missed_bounds, 'normal, float32'),
    {'model': choices.NoNorm},
  ),
  bug.Bug(
    'a bound on a logit without the rounding of its product',
    functools.partial(choices.missed_bounds, 'integers, float32'),
    {'model': choices.NoSlack},
  ),
  bug.Bug(
    'a choice among few tokens where others may be better',
    functools.partial(choices.wrong_choices, 'groups of 320, float32'),
    {'model': choices.NoFallback},
  ),
)
