"""Makes the store of texts that `drafters.Suffix` searches.

  python -m experiments.make_store --data=data/smollm2 --out=STORE
  python -m experiments.make_store --data=data/a --data=data/b --out=STORE
  python -m experiments.make_store --data=... --out=... --tokens=500000

The texts are the target's answers in folders of make_data, as tokens, in the
order of --data. If there are more tokens than --tokens, the last answers are
kept.
"""

import itertools

from absl import flags

from experiments.command import cli
from experiments.command import frame
from experiments.methods import remembering
from experiments.training_data import data_folder
import specsample
from specsample import files

frame.define_flags('configs/runs/store.gin')
_DATA = flags.DEFINE_multi_string(
  'data',
  None,
  'A folder of make_data; may be given several times.',
  required=True,
)
_OUT = flags.DEFINE_string(
  'out',
  None,
  'Folder of the store, which must not exist yet; here or in a bucket (gs://).',
  required=True,
)
_TOKENS = flags.DEFINE_integer(
  'tokens', 2_000_000, 'The most tokens to keep.', lower_bound=1
)


def main() -> None:
  """Reads, sorts and writes the texts, then prints how much is in the store."""
  with cli.bad_input():
    loaded = remembering.target()
    folders = [data_folder.load(path, loaded) for path in _DATA.value]
    texts = [answer for folder in folders for answer in _answers(folder)]
    size = min(_TOKENS.value, sum(len(text) + 1 for text in texts))
    store = specsample.store.build(
      texts, vocab_size=loaded.model.vocab_size, capacity=size
    )
    kept = specsample.store.texts_of(store)
    specsample.save_store(
      _OUT.value,
      store,
      target=loaded,
      card={
        'target': loaded.fingerprint,
        'data': [folder.digest() for folder in folders],
        'left out': len(texts) - len(kept),
      },
    )
  num_tokens = sum(text.size for text in kept)
  print(
    f'{num_tokens:,} tokens in {len(kept):,} answers: {files.at(_OUT.value)}'
  )
  if len(kept) < len(texts):
    print(
      f'{len(texts) - len(kept):,} answers before them are left out: raise '
      '--tokens to keep them'
    )


def _answers(folder):
  """Yields the target's answers in a data folder, as lists of token ids."""
  for dialogue in itertools.chain(*folder.shards):
    if dialogue.source != data_folder.Source.TEXT:
      for start, end in dialogue.answers:
        yield dialogue.tokens[start:end].tolist()


if __name__ == '__main__':
  frame.run(main)
