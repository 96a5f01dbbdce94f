"""Decodes one prompt or holds a chat, streaming the text as it comes.

  python -m experiments.generate --chat --prompt='Why is the sky blue?'
  python -m experiments.generate --chat --prompt='...' --drafter=none,mtp --show
  python -m experiments.generate --prompt='...' --top_candidates=5 --show_drafts
  python -m experiments.generate --interactive

The text goes to standard output, alone if that is not a terminal; metrics and
everything else go to standard error. --show colours each token by its origin:
accepted draft, correction, bonus, or plain if the round drafted nothing.
--show_drafts shows each round as it is decoded: the draft tokens with their
probabilities under drafter and target, rejected tokens struck through (~~x~~ if
the output is not a terminal), and what the token after them was drawn from.
Rounds then run one at a time, which costs some milliseconds each; the tokens
stay the same.
--interactive reads a turn per line; Ctrl-C ends an answer, and Ctrl-D the chat.
"""

# JAX and the library are imported after the flags are parsed, so that something
# is on the screen while they load.

from absl import flags

from experiments.command import cli
from experiments.command import frame

# In the order of configs/runs/generate.gin.
DRAFTERS = (
  *('auto', 'none', 'ngram', 'suffix', 'either', 'skip', 'draft', 'medusa'),
  *('medusa_tree', 'hydra', 'hydra_tree', 'eagle', 'eagle3', 'mtp', 'mtp_tree'),
  *('dflash', 'dflash2', 'dspark', 'dspark_tree', 'peagle', 'pard'),
  'assistant',
)

frame.define_flags('configs/runs/generate.gin', on_hosts=True)
flags.DEFINE_string('prompt', '', 'What to continue, or to answer.')
flags.DEFINE_bool(
  'chat', False, "Put the prompt into the chat template, as a user's turn."
)
flags.DEFINE_bool(
  'interactive',
  False,
  'Chat: read one turn per line from standard input until it ends (Ctrl-D). '
  '--prompt, if given, is the first turn.',
)
flags.DEFINE_list(
  'drafter',
  None,
  f'The drafter: {", ".join(DRAFTERS)}. Several, separated by commas, answer '
  'one after the other. Default auto or, with --top_candidates, draft.',
)
flags.DEFINE_integer(
  'num_draft_tokens',
  None,
  "K, draft tokens per round; default the drafter's own.",
  lower_bound=0,
)
flags.DEFINE_integer(
  'top_candidates',
  None,
  'Draft this many candidates for each of K positions, the most likely tokens '
  'of the drafter, of which the target picks one. For skip, draft (the default '
  'here), medusa, hydra, eagle, eagle3, mtp, dflash, dflash2, dspark, peagle, '
  'pard and assistant.',
  lower_bound=1,
)
flags.DEFINE_float(
  'temperature',
  None,
  '0 is greedy; default as configured, which is 0 in the shipped files.',
  lower_bound=0,
)
flags.DEFINE_float(
  'top_p',
  None,
  'Sample from the smallest set of tokens with this probability, in (0, 1]; '
  'default as configured.',
)
flags.DEFINE_integer(
  'top_k',
  None,
  'Sample from this many of the most likely tokens, 0 for all; default as '
  'configured.',
)
flags.DEFINE_float(
  'min_p',
  None,
  'Sample from tokens at least this likely relative to the best one, in '
  '[0, 1]; default as configured.',
)
flags.DEFINE_integer(
  'max_new_tokens',
  128,
  'The most tokens to generate; in a chat, per answer.',
  lower_bound=1,
)
flags.DEFINE_integer(
  'max_length',
  1024,
  'With --interactive: the most tokens of the whole chat, turns and answers '
  'together; never more than the model takes.',
  lower_bound=1,
)
flags.DEFINE_integer(
  'seed',
  0,
  'Determines which tokens are drawn.',
  lower_bound=0,
  # JAX would leave out the bits of a larger one.
  upper_bound=2**32 - 1,
)
flags.DEFINE_bool(
  'show', False, 'Colour each token by its origin (brackets without colours).'
)
flags.DEFINE_bool(
  'show_drafts',
  False,
  "Show each round: the draft tokens, the drafter's and the target's "
  'probabilities, which of them are kept, and where the next token is from.',
)
flags.DEFINE_string(
  'out', None, 'Folder for generate.json, here or in a bucket (gs://).'
)
flags.register_validator(
  'out',
  lambda out: not (out and flags.FLAGS['interactive'].value),
  'a chat writes no file: give --out or --interactive, not both',
)
flags.register_validator(
  'show_drafts',
  lambda shows: not (shows and flags.FLAGS['show'].value),
  'give --show_drafts or --show, not both',
)
flags.register_validator(
  'drafter',
  lambda names: (
    names is None
    or len(names) == 1
    or (
      names
      and not flags.FLAGS['out'].value
      and not flags.FLAGS['interactive'].value
    )
  ),
  'name at least one drafter, and only one with --out or --interactive',
)


def main() -> None:
  """Shows what is under way, then loads everything that decodes."""
  from experiments.command import progress  # noqa: PLC0415

  prompt = flags.FLAGS.prompt
  if not (prompt.strip() or flags.FLAGS.interactive):
    cli.fail(
      f'--prompt={prompt}: give a prompt that is not empty, or --interactive '
      '(--help lists the flags)'
    )
  with cli.bad_input():
    cli.check_utf8('--prompt', prompt)
  # Which of several processes is the first is known only once they have met.
  is_shown = not flags.FLAGS.distributed and flags.FLAGS.num_processes is None
  with progress.Stages(is_shown) as stages:
    stages.begin('importing', 'JAX')
    from experiments.decoding import generating  # noqa: PLC0415

    generating.run(stages)


if __name__ == '__main__':
  cli.run(main)
