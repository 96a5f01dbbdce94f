r"""Compares drafts of another vocabulary: of shared tokens and of text.

  python -m experiments.vocabularies
  python -m experiments.vocabularies --target=gemma-3-270m \
    --draft=smollm2-135m-instruct --prompts=questions.jsonl --limit=8

Prints what the two vocabularies share and the tokens a round of both ways, TLI
and SLEM; ends with an error where a greedy output is not the target's own.
Prompts are continued as plain text, in one batch.
"""

from typing import Any

from absl import flags
import jax
import numpy as np

from experiments import cli
from experiments import config
from experiments import environment
from experiments import prompts as prompts_lib
import specsample

_TARGET = flags.DEFINE_string(
  'target', 'smollm2-135m-instruct', 'As specsample.load takes it.'
)
_DRAFT = flags.DEFINE_string('draft', 'gemma-3-270m', 'The same.')
_PROMPTS = flags.DEFINE_string(
  'prompts', 'experiments/data/prompts.jsonl', 'As of experiments.evaluate.'
)
_LIMIT = flags.DEFINE_integer('limit', 8, 'So many prompts.', lower_bound=1)
_NUM_DRAFT_TOKENS = flags.DEFINE_integer(
  'num_draft_tokens', 3, 'K, drafts a round.', lower_bound=1
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
  'max_new_tokens', 64, 'At most so many tokens.', lower_bound=1
)
_TEMPERATURE = flags.DEFINE_float(
  'temperature', 0.0, '0 is greedy.', lower_bound=0
)


def main() -> None:
  """Loads, maps, decodes and prints."""
  environment.set_up()
  with cli.bad_input():
    found = prompts_lib.read(config.find(_PROMPTS.value), _LIMIT.value)
    target = specsample.load(_TARGET.value)
    draft = specsample.load(_DRAFT.value)
    own = specsample.map_vocabulary(draft, target)
  print(
    f'{_DRAFT.value} drafts for {_TARGET.value}: {own.kind.value}, '
    f'{own.num_shared} tokens of {own.num_draft_tokens} and '
    f'{own.num_target_tokens}'
  )
  tokens = [target.tokenizer.encode(prompt.text) for prompt in found]
  padded, lengths = specsample.pad_prompts(tokens)
  settings: dict[str, Any] = {
    'verify': specsample.verify.chain,
    'sampling': specsample.Sampling(temperature=_TEMPERATURE.value),
    'max_new_tokens': _MAX_NEW_TOKENS.value,
    'stop': specsample.Stop(eos_ids=target.tokenizer.eos_ids),
  }
  key = jax.random.key(0)

  def decode(drafter, params):
    return specsample.generate(
      {'target': target.params} | params,
      *(padded, lengths, key),
      model=target.model,
      drafter=drafter,
      **settings,
    )

  plain = decode(specsample.drafters.NoDraft(), {})
  tli = specsample.drafters.TLI(
    model=draft.model,
    vocab_size=target.model.vocab_size,
    num_draft_tokens=_NUM_DRAFT_TOKENS.value,
  )
  outputs = {
    'TLI': decode(tli, {'drafter': own.params(draft.params)}),
    'SLEM': specsample.slem.generate(
      *(target, draft, tokens, key),
      num_draft_tokens=_NUM_DRAFT_TOKENS.value,
      **settings,
    ),
  }
  for name, output in outputs.items():
    stats = specsample.stats.of(output)
    kept = ', '.join(f'{x:.2f}' for x in stats.acceptance_by_position)
    print(
      f'{name}: {stats.tokens_per_round:.2f} tokens a round '
      f'({stats.tokens} in {stats.rounds}), drafts kept by position {kept}'
    )
    if not _TEMPERATURE.value and not np.array_equal(
      output.tokens, plain.tokens
    ):
      raise SystemExit(f'{name} does not give the tokens of the target')


if __name__ == '__main__':
  cli.run(main)
