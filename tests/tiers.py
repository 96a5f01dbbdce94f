"""Which tests wait for the night, and the order of those of the day.

`./test.sh` runs the day's; `./test.sh --nightly` runs what it leaves out.
tests/README.md says which tests see which class of bug.
"""

from collections.abc import Iterable
import dataclasses
import functools
import re


@dataclasses.dataclass(frozen=True)
class Night:
  """Tests of the night, and what the day keeps of them.

  In names of tests, from tests/ on, * stands for anything.
  """

  tests: str
  but: tuple[str, ...] = ()

  @property
  def file(self) -> str:
    """The file of the tests, named from tests/ on."""
    return self.tests.partition('::')[0]

  def holds(self, name: str) -> bool:
    """Whether the test of this name waits for the night."""
    stays = any(_pattern(kept).fullmatch(name) for kept in self.but)
    return not stays and bool(_pattern(self.tests).fullmatch(name))


@functools.cache
def _pattern(text):
  return re.compile('.*'.join(map(re.escape, text.split('*'))), re.DOTALL)


_MESHES = 'on_8_devices/check_'
_GENERATE = f'{_MESHES}generate.py::'
_NOISE = f'{_GENERATE}test_noise_of_a_position_is_that_of_one_device'
_ALONE = f'{_GENERATE}test_a_mesh_may_divide_the_model_alone'
_LOOP = 'test_sampled_loop.py::test_compiled_loop_follows_the_target'
_TRAINABLE = 'drafters/test_trainable.py::test_'
_EITHER = 'drafters/test_either.py::test_'
_ADAPTIVE = 'drafters/test_adaptive.py::test_'
_TREE = 'drafters/test_tree.py::test_'
_FEATURES = 'drafters/test_feature_chain.py::test_'
_TRAIN = 'experiments/test_train.py::test_'

NIGHTS = (
  # Meshes: a drafter of each kind of state, each rule of chains, trees of two
  # kinds. A sharding is part of an array's type, so that most of what goes
  # wrong does so for all drafters that share a layer.
  Night(
    f'{_NOISE}*',
    but=(
      f'{_NOISE}[chain]',
      f'{_NOISE}[dspark]',
      f'{_NOISE}[eagle-3]',
    ),
  ),
  Night(
    f'{_ALONE}*',
    but=(
      f'{_ALONE}[medusa-block]',
      f'{_ALONE}[none-chain]',
      f'{_ALONE}[chain of a replicated model-synthetic]',
    ),
  ),
  Night(
    f'{_GENERATE}test_tokens_are_those_of_one_device_on*',
    but=('*2x4-explicit-ngram-block]', '*1x8-auto-ngram-block]'),
  ),
  Night(f'{_GENERATE}test_tokens_are_those_of_one_device_with*'),
  Night(
    f'{_MESHES}trees.py::*',
    but=(
      '*one_device[eagle-3, dynamic]',
      '*one_device[dspark, lattice]',
      '*penalties*',
    ),
  ),
  Night(
    f'{_MESHES}families.py::test_tokens_are_those_of_one_device*',
    but=('*[deepseek-True-shape1-False]',),
  ),
  Night(
    f'{_MESHES}sharding.py::test_no_round_gathers*',
    but=('*rule0-shape0-True]', '*rule3-shape3-False]', '*rule4-shape4-True]'),
  ),
  Night(f'{_MESHES}experiments.py::test_parts_of_a_round_are_timed'),
  Night(
    f'{_MESHES}training.py::test_step_is_that_of_one_device*',
    but=('*[2x4-explicit-medusa-2]', '*[1x8-auto-eagle-3]'),
  ),
  Night(
    f'{_MESHES}training.py::test_own_texts_are_those_of_one_device*',
    but=('*[2x4-explicit]',),
  ),
  Night(f'{_MESHES}published.py::*', but=('*[eagle-3]',)),
  Night(
    f'{_MESHES}training.py::test_step_of_packed_rows*',
    but=('*[2x4-explicit-eagle-3]',),
  ),
  Night(
    f'{_MESHES}training.py::test_tokens_of_long_rows*',
    but=('*[dspark-shape1-*', '*[eagle-3-shape4-*'),
  ),
  Night(f'{_MESHES}rollout.py::*', but=('*[2x4-explicit]', '*[1x8-auto]')),
  Night(
    f'{_MESHES}certified.py::*',
    but=('*[2x4-explicit-tree]', '*[1x8-auto-coupled]'),
  ),
  # The sampled loop: each rule with a chain, trees of each kind with each of
  # their rules, once with a network. Enumeration has the drafters by day.
  Night(f'{_LOOP}*DSpark + block*'),
  Night(f'{_LOOP}*DSpark, *'),
  Night(f'{_LOOP}*TokenProbability + traversal*'),
  Night(f'{_LOOP}*TopNodes + tree*'),
  Night(f'{_LOOP}*TLI + block*'),
  Night(f'{_LOOP}*Online distillation*'),
  Night(f'{_LOOP}*EAGLE-3 + block*'),
  Night(f'{_LOOP}*Adaptive, *', but=('*Fastest + chain*',)),
  Night(f'{_LOOP}*[Ngram + *', but=('*+ chain*',)),
  Night(f'{_LOOP}*[NoDraft + *', but=('*+ chain*',)),
  Night(f'{_LOOP}*Chain of the least*', but=('*+ block*',)),
  Night(f'{_LOOP}*LatticeTree of DFlash*'),
  Night(f'{_LOOP}*Tree of Medusa*'),
  Night(f'{_LOOP}*Either*', but=('*Suffix and Chain + block*',)),
  Night(f'{_LOOP}*Suffix*', but=('*Either*', '*[Suffix + chain*')),
  Night(f'{_LOOP}*Hydra*', but=('*Hydra + coupled*',)),
  Night(f'{_LOOP}*Skip*', but=('*Skip + coupled*',)),
  Night(f'{_LOOP}*PARD*', but=('*PARD + block*',)),
  # Drafters: one with heads, one with a cache of its own features, one block.
  Night(
    f'{_TRAINABLE}where_no_draft_is_allowed_the_target_goes_on_alone*',
    but=('*[hydra++-rule0]', '*[eagle3-rule1]', '*[dflash-rule2]'),
  ),
  Night(
    f'{_TRAINABLE}greedy_tokens_are_the_targets_own_in_bfloat16*',
    but=('*[mtp]', '*[dspark]', '*[hydra++]'),
  ),
  Night(
    f'{_TRAINABLE}a_step_is_taken_in_bfloat16*',
    but=('*[mtp]', '*[dspark]', '*[hydra]'),
  ),
  Night(
    f'{_TRAINABLE}a_row_of_a_running_batch_can_be_refilled*',
    but=('*[eagle3]', '*[hydra++]'),
  ),
  Night(
    f'{_EITHER}the_trained_drafter_misses_nothing_of_remembered_rounds*',
    but=('*[mtp]',),
  ),
  Night(f'{_EITHER}greedy_output_is_the_targets_own*', but=('*[mtp]',)),
  # `test_sampled_loop.py` has both.
  Night(f'{_EITHER}the_compiled_loop_follows_the_target*'),
  Night('drafters/test_suffix.py::test_the_compiled_loop_follows_the_target'),
  Night(
    f'{_ADAPTIVE}behind_rounds_that_were_left_out_it_drafts_as_ever*',
    but=('*[tree]',),
  ),
  Night(
    f'{_ADAPTIVE}greedy_output_is_the_targets_own*', but=('*tree-fastest]',)
  ),
  # The loop and the drafter inside have such tests of their own by day.
  Night(f'{_ADAPTIVE}rows_are_the_same_in_any_batch*'),
  Night(f'{_EITHER}rows_are_the_same_in_any_batch*'),
  Night(
    f'{_TREE}greedy_output_is_the_targets_own*',
    but=('*medusa-rule*]', '*eagle-3-rule*]', '*dspark-rule*]'),
  ),
  Night(
    f'{_TREE}siblings_are_the_most_likely_behind_their_path*',
    but=('*[eagle-3]',),
  ),
  Night(f'{_TREE}rows_are_the_same_in_any_batch[hydra]'),
  Night(
    f'{_TREE}behind_kept_paths_it_drafts_as_one_that_is_given_all_at_once*',
    but=('*[eagle-3]',),
  ),
  Night(
    f'{_FEATURES}the_cache_is_of_the_targets_own_features*',
    but=('*mtp of 2-float32*',),
  ),
  # A tree of EAGLE-3 has such a test by day.
  Night(f'{_FEATURES}rows_are_the_same_in_any_batch*'),
  Night(
    f'{_FEATURES}training_sees_what_drafting_sees*',
    but=('*mtp of 4-3]', '*eagle3-None]'),
  ),
  Night(
    f'{_FEATURES}drafts_are_those_worked_out_by_hand*',
    but=('*mtp of 4-3]', '*eagle-None]', '*eagle3-3]'),
  ),
  Night(f'{_FEATURES}greedy_output_is_the_targets_own*', but=('*mtp of 2]',)),
  Night(
    'drafters/test_heads.py::test_rows_are_the_same_in_any_batch*',
    but=('*[hydra++]',),
  ),
  Night(
    'drafters/test_heads.py::test_training_sees_what_drafting_sees*',
    but=('*[hydra++]',),
  ),
  Night(
    'drafters/test_heads.py::test_a_round_leaves_the_true_hidden_vector*',
    but=('*[hydra++]',),
  ),
  Night('drafters/test_tli.py::test_rows_are_the_same_in_any_batch[1.5]'),
  Night('drafters/test_draft_model.py::test_rows_are_the_same*'),
  Night('drafters/test_dflash.py::test_rows_are*batch[dspark]'),
  Night('drafters/test_dflash.py::test_greedy*[dspark]'),
  Night('drafters/test_dflash.py::test_a_round_leaves*[dspark]'),
  Night('drafters/test_recording.py::*corrections*', but=('*chain]', '*tree]')),
  Night(
    'training/test_online.py::test_acceptance_rises*',
    but=('*[Chain]', '*[Medusa]', '*[EAGLE-3]'),
  ),
  Night(
    'training/test_online.py::test_an_update_is_a_step_on*',
    but=('*[Chain]', '*[EAGLE-3]'),
  ),
  Night(
    'drafters/test_layer_config.py::test_*',
    but=('*of_latent*draft model]', '*greedy*eagle3]', '*refused*'),
  ),
  # The loop.
  Night(
    'loop/test_continuous.py::test_every_output_is_that_of_a_static_batch*',
    but=('*[drafter0*', '*[drafter3*'),
  ),
  Night('loop/test_continuous.py::*begins_anew*[DFlash]'),
  Night('loop/test_continuous.py::*batch_shrinks*model1*'),
  Night(
    'loop/test_invalid_logits.py::*test_what_comes_before*',
    but=('*Block-Chain-0]', '*Traversal*'),
  ),
  Night(
    'loop/test_invalid_logits.py::*stop_their_row_only*',
    but=('*drafter1*', '*drafter6*', '*drafter4*'),
  ),
  Night(
    'loop/test_turns.py::test_extended_rows_go_on_as_the_whole_text_does*',
    but=('*[Adaptive]', '*[MTP]', '*[Hydra++]', '*[Suffix]'),
  ),
  Night(
    'loop/test_generate.py::test_greedy_equals_autoregressive*',
    but=('*ngram-block]', '*skip-coupled]', '*chain-chain]', '*none-chain]'),
  ),
  Night('loop/test_decode.py::test_penalties*', but=('*penalty2]',)),
  Night(
    'loop/test_decode.py::test_log_probs*', but=('*0.0-chain]', '*0.0-tree]')
  ),
  Night('training/test_rollout.py::test_log_probs*', but=('*-sampling1]',)),
  Night('loop/test_invalid_logits.py::*rejected*of int8]'),
  # Bugs whose statistic takes many rows, each beside one of its kind by day.
  Night('test_planted_bugs.py::*position shared with the residual*'),
  Night('test_planted_bugs.py::*weights updated between*'),
  Night("test_planted_bugs.py::*holds the row's own future*"),
  Night('test_planted_bugs.py::*greedy rows mishandled*'),
  Night('test_planted_bugs.py::*penalties updated once a round*'),
  Night('test_planted_bugs.py::*one length for all rows*'),
  Night('test_planted_bugs.py::*paths of a lattice*'),
  Night('test_planted_bugs.py::*padded vocabulary*'),
  Night('test_planted_bugs.py::*rank of the token*'),
  Night('test_planted_bugs.py::*probability of a path up to*'),
  Night('test_planted_bugs.py::*siblings that were drawn pruned*'),
  Night('test_planted_bugs.py::*penalties count nodes*'),
  Night('test_planted_bugs.py::*policy before its last step*'),
  # `test_planted_bugs.py` has nearly all of them by day.
  Night(
    'test_audited_bugs.py::test_is_found*',
    but=(
      '*residual = p instead*',
      '*temperature after top-p*',
      '*min-p of the sum*',
      '*kept unverified*',
      '*verified greedily*',
      '*skipped on full acceptance*',
      '*from raw logits*',
      '*from bf16 logits*',
      '*declared with the law of the drawn ones*',
      '*last ratio in block mode*',
      '*a budget of drafts chosen*',
    ),
  ),
  Night(
    'test_planted_bugs.py::*recurrent state*',
    but=('*left in a recurrent state]', '*first nodes folded*'),
  ),
  # Caches: each form once; a ring of int8 with sinks has the parts of four.
  Night(
    'models/test_cache.py::test_passes_over_a_cache_equal_those_without*',
    but=('*[full]', '*[int8_sinks]', '*[int8_shared]', '*[latent_ring]'),
  ),
  Night('models/test_cache.py::test_a_chunk_that_is_longer*[ring]'),
  Night('testing/test_model_properties.py::test_the_page_runs*'),
  Night('testing/test_model_properties.py::*pages_model_in_trees'),
  # Families: decoding over wrong drafts begins with a prefill.
  Night(
    'models/test_families.py::test_prefill_equals_transformers*',
    but=('*[llama]', '*[deepseek_v3]', '*[qwen3_moe]'),
  ),
  Night('test_mtp_of_deepseek.py::*output*[int8]'),
  Night('test_mtp_of_deepseek.py::*keys_and_values*[Eagle3]'),
  Night('loading/published/test_heads.py::test_greedy*[medusa]'),
  # Executables as users have them.
  Night(
    'with_default_flags/check_draws.py::test_draws_in_bfloat16*',
    but=('*[MTP]',),
  ),
  Night(
    'with_default_flags/check_draws.py::test_compiled_loop*',
    but=('*[Chain + block*',),
  ),
  Night('with_default_flags/check_gemma.py::*'),
  Night('with_default_flags/check_readme.py::*'),
  Night('test_with_default_flags.py::test_an_evaluation_passes'),
  Night('test_with_default_flags.py::test_a_mesh_passes'),
  # Real weights.
  Night(
    'with_default_flags/check_smollm2.py::test_greedy_equals_autoregressive*',
    but=('*[mtp]',),
  ),
  Night('with_default_flags/check_smollm2.py::test_row_is_the_same_alone*'),
  Night('with_default_flags/check_smollm2.py::test_coupled*'),
  Night('vocabularies/test_two_vocabularies.py::*'),
  Night('models/test_int8.py::test_smollm2*'),
  Night('test_colab.py::test_reproduce_a_table'),
  Night('test_colab.py::test_add_a_drafter'),
  Night('test_colab.py::test_rollouts'),
  Night('test_colab.py::test_audit'),
  # Training.
  Night(f'{_TRAIN}configurations_train*'),
  Night(f'{_TRAIN}a_finished_run_goes_on_from_before_its_decay'),
  Night(f'{_TRAIN}a_killed_run_gives_the_same_curve_and_weights[6]'),
  Night(f'{_TRAIN}a_mesh_gives_the_same_curve'),
  Night(f'{_TRAIN}a_full_disk_leaves_the_last_checkpoint'),
  Night(
    'training/test_heads.py::test_losses_fall_and_drafts_are_kept*',
    but=('*[hybrid]',),
  ),
  Night(
    'training/test_eagle.py::*',
    but=('*mtp]', '*refused*'),
  ),
  Night('training/test_unrolled.py::test_outputs*', but=('*eagle3]', '*3]')),
  Night('training/test_unrolled.py::test_twenty_steps*', but=('*mtp]',)),
  Night('training/test_draft.py::test_losses*', but=('*[tokens]',)),
  Night('training/test_slots.py::*[features]'),
  Night(
    'experiments/training/test_held_out.py::*eos_ids0]',
    but=('*[MTP-*', '*DSpark*', '*Hydra++*'),
  ),
  Night('experiments/training/test_held_out.py::*eos_ids1]'),
  # Commands: two processes on a mesh run by day.
  Night('experiments/test_certify_command.py::*fails_the_command'),
  Night('experiments/test_benchmark.py::test_one_command_measures*'),
  Night('experiments/methods/test_adaptive.py::*where_drafts_are_never_kept'),
  Night('experiments/command/test_mesh.py::*'),
  Night('experiments/test_buckets.py::test_an_evaluation_goes_on*'),
  Night('experiments/test_benchmark.py::*[synthetic]'),
  Night('experiments/html_report/test_without_matplotlib.py::*'),
  Night(
    'experiments/evaluation/test_refilled.py::test_nothing_is_compiled*',
    but=('*[3]',),
  ),
  Night('training/test_dflash.py::test_losses*[dspark]'),
  Night('experiments/decoding/test_conversing.py::*conversation_is[skip]'),
  Night('experiments/evaluation/test_decoding.py::*300-1.0]'),
)


# These start tests of their own, which are left out one by one.
_OF_BOTH = (
  'test_on_8_devices.py::test_passes',
  'test_with_default_flags.py::test_passes',
)
# First what takes no compiler, then the rules, and behind them what takes long,
# longest first: the shorter files fill up what is left to do.
_FIRST = (
  *('test_layering.py', 'test_stats.py', 'test_streams.py', 'test_tree.py'),
  *('text/', 'cost/', 'verify/', 'policies/', 'testing/', 'test_sampling.py'),
  *('test_exactness.py', 'test_planted_bugs.py', 'test_audited_bugs.py'),
  'test_sampled_loop.py',
  *('test_on_8_devices.py', 'test_with_default_flags.py', 'test_colab.py'),
  'experiments/test_train.py',
  *('drafters/', 'loop/', 'experiments/', 'models/', 'loading/'),
)


def is_of(nightly: bool, name: str) -> bool:
  """Whether a test, named from tests/ on, runs then: at night or by day."""
  waits = any(night.holds(name) for night in NIGHTS)
  return name.startswith(_OF_BOTH) or waits == nightly


def turn(path: str) -> int:
  """The place of a file, named from tests/ on, in the order of all."""
  matches = (i for i, start in enumerate(_FIRST) if path.startswith(start))
  return next(matches, len(_FIRST))


def that_fit_nothing(names: Iterable[str]) -> list[str]:
  """Patterns of `NIGHTS` that fit none of the tests of some whole files."""
  names = list(names)
  files = {name.partition('::')[0] for name in names}
  unused = []
  for night in NIGHTS:
    if night.file not in files:
      continue
    of_night = list(filter(_pattern(night.tests).fullmatch, names))
    unused += [
      pattern
      for pattern in (night.tests, *night.but)
      if not any(map(_pattern(pattern).fullmatch, of_night))
    ]
  return unused
