"""Decodes one prompt, streaming the text as it comes.

  python -m experiments.generate --chat --prompt='Why is the sky blue?'
  python -m experiments.generate --chat --prompt='...' --drafter=skip --show

The text goes to standard output, alone where that is no terminal; the metrics
and all else go to standard error. --show prints a line a round instead, each
token coloured by its origin: accepted draft, correction or bonus.
"""

import dataclasses

from absl import flags

from experiments import cli
from experiments import config
from experiments import distributed
from experiments import environment
from experiments import generation
from experiments import mesh
from experiments import methods
from experiments import result_file
from experiments import terminal
from specsample import files

config.define_flags('configs/runs/generate.gin')
flags.adopt_module_key_flags(config)
distributed.define_flags()
flags.adopt_module_key_flags(distributed)
_PROMPT = flags.DEFINE_string('prompt', '', 'What to continue, or to answer.')
_CHAT = flags.DEFINE_bool('chat', False, 'Answer the prompt in a chat.')
_DRAFTER = flags.DEFINE_string('drafter', 'ngram', 'none, ngram, skip, ...')
_NUM_DRAFT_TOKENS = flags.DEFINE_integer(
  'num_draft_tokens',
  None,
  "K, drafts a round; default the drafter's own.",
  lower_bound=0,
)
_TEMPERATURE = flags.DEFINE_float(
  'temperature', 0.0, '0 is greedy.', lower_bound=0
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
  'max_new_tokens', 128, 'At most so many tokens.', lower_bound=1
)
_SEED = flags.DEFINE_integer('seed', 0, 'Fixes the tokens that are drawn.')
_SHOW = flags.DEFINE_bool('show', False, 'Show the rounds, by colour.')
_OUT = flags.DEFINE_string(
  'out', None, 'Folder for generate.json, here or in a bucket (gs://).'
)
flags.register_validator(
  'prompt',
  lambda prompt: bool(prompt.strip()),
  'give a prompt that is not empty',
)


def main() -> None:
  """Checks everything, then decodes and shows."""
  config.parse()
  with cli.bad_input():
    distributed.start()
  environment.set_up()
  with mesh.configured():
    _generate()


def _generate() -> None:
  with cli.bad_input():
    out = files.at(_OUT.value) if _OUT.value else None
    generator = generation.Generator()
    method = generator.method(_DRAFTER.value, _NUM_DRAFT_TOKENS.value)
    target = generator.load()
    tokens = generation.encode(target.tokenizer, _PROMPT.value, _CHAT.value)
    sampling = dataclasses.replace(
      generator.sampling, temperature=_TEMPERATURE.value
    )
    max_new_tokens = _MAX_NEW_TOKENS.value
    methods.check(
      method,
      [tokens],
      model=target.model,
      target=target.params,
      sampling=sampling,
      max_new_tokens=max_new_tokens,
    )
    if out is not None:
      cli.make_folder(out)
    state = generation.begin(
      target,
      method,
      tokens,
      sampling=sampling,
      max_new_tokens=max_new_tokens,
      seed=_SEED.value,
    )
  rounds = generation.rounds(target, method, state)
  if not distributed.is_first():
    for _ in rounds:
      pass
    return
  shown = terminal.show(rounds, target.tokenizer, by_round=_SHOW.value)
  if out is not None:
    result = generation.result(_PROMPT.value, shown, target.tokenizer)
    result_file.write(out / 'generate.json', environment.describe() | result)


if __name__ == '__main__':
  cli.run(main)
