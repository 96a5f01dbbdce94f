"""A draft model with another vocabulary: drafting shared tokens, or text."""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import math
import pathlib

import gin
import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.command import environment
from experiments.command import progress as progress_lib
from experiments.evaluation import evaluation as evaluation_lib
from experiments.reporting import result_file
import specsample


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
  """A target and a draft model, and how they decode.

  Attributes:
    evaluation: gives the target and its settings; its methods are ignored.
    draft: the draft model.
    num_draft_tokens: K, for both ways of drafting.
  """

  evaluation: evaluation_lib.Evaluation
  draft: specsample.Loaded
  num_draft_tokens: int = 3

  @functools.cached_property
  def shared(self) -> specsample.VocabMap:
    """The map of both vocabularies; ValueError if they share too few tokens."""
    return specsample.map_vocabulary(self.draft, self.evaluation.target)

  @functools.cached_property
  def tli(self) -> methods_lib.Method:
    """The method that drafts shared tokens."""
    return methods_lib.of_shared_tokens(
      self.draft, self.evaluation.target, self.shared, self.num_draft_tokens
    )

  def check(self, tokens: Sequence[list[int]]) -> None:
    """Refuses settings that cannot decode the prompts' tokens.

    Raises:
      ValueError: a setting does not fit; the message names it.
    """
    methods = {'TLI': self.tli}
    dataclasses.replace(self.evaluation, methods=methods).check(tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """The results of one way of drafting, over all prompts."""

  way: str
  tokens: int
  rounds: int
  tokens_per_round: float
  plain_rounds: float  # the share that drafted nothing
  acceptance_by_position: list[float | None]  # None if never drafted
  equals_target: bool | None  # None if tokens are sampled


def rows(
  comparison: Comparison,
  tokens: Sequence[list[int]],
  progress: progress_lib.Bar,
) -> Iterator[Row]:
  """Decodes all prompts in one batch, in both ways and without drafts."""
  evaluation = comparison.evaluation
  generate = lambda method: evaluation.generate(
    method, tokens, range(len(tokens))
  )
  ways = {
    'TLI': lambda: generate(comparison.tli),
    'SLEM': lambda: _over_text(comparison, tokens),
  }
  with progress(1 + len(ways)) as step:
    step('the target alone')
    plain = generate(methods_lib.Method(specsample.drafters.NoDraft()))
    for way, decode in ways.items():
      step(way)
      yield _row(way, decode(), plain, evaluation.sampling)


def _over_text(comparison, tokens):
  evaluation = comparison.evaluation
  return specsample.slem.generate(
    evaluation.target,
    comparison.draft,
    tokens,
    jax.random.key(evaluation.seed),
    num_draft_tokens=comparison.num_draft_tokens,
    verify=specsample.verify.chain,
    sampling=evaluation.sampling,
    max_new_tokens=evaluation.max_new_tokens,
    stop=evaluation.stop,
  )


def _row(way, output, plain, sampling) -> Row:
  stats = specsample.stats.summarize(output)
  equals = None
  if sampling.temperature == 0:
    equals = bool(np.array_equal(output.tokens, plain.tokens))
  return Row(
    way=way,
    tokens=stats.tokens,
    rounds=stats.rounds,
    tokens_per_round=stats.tokens_per_round,
    plain_rounds=stats.plain_rounds,
    acceptance_by_position=[
      None if math.isnan(share) else share
      for share in stats.acceptance_by_position
    ],
    equals_target=equals,
  )


def write(
  out: pathlib.PurePath, shared: specsample.VocabMap, found: Sequence[Row]
) -> None:
  """Writes vocabularies.json."""
  content = {
    'vocabularies': {
      'kind': shared.kind.value,
      'shared': shared.num_shared,
      'of_draft_model': shared.num_draft_tokens,
      'of_target': shared.num_target_tokens,
    },
    'rows': [dataclasses.asdict(row) for row in found],
    'gin_config': gin.operative_config_str(),
  }
  described = environment.describe()
  result_file.write(out / 'vocabularies.json', content | described)


def lines(shared: specsample.VocabMap, found: Sequence[Row]) -> list[str]:
  """Returns the summary, one fact per line."""
  summary = [
    f'{shared.kind.value}: {shared.num_shared} tokens are shared, of '
    f'{shared.num_draft_tokens} in the draft model and '
    f'{shared.num_target_tokens} in the target'
  ]
  for row in found:
    kept = ', '.join(
      '-' if share is None else f'{share:.2f}'
      for share in row.acceptance_by_position
    )
    summary.append(
      f'{row.way}: {row.tokens_per_round:.2f} tokens per round ({row.tokens} '
      f'in {row.rounds}), {row.plain_rounds:.0%} of the rounds without a '
      f'draft, draft tokens kept by position {kept}'
    )
  return summary
