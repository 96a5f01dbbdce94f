"""Saving and loading of stores of texts.

A folder holds tokens.npz, 2 bytes per token (or 4) before compression, and
store.json, which is written last. The order of the places is not stored but
sorted again when loading, in about a second per million tokens.
"""

from collections.abc import Mapping
import hashlib
import json
import os
from typing import Any
import zipfile

import numpy as np

from specsample import files
from specsample.loading import card as card_lib
from specsample.loading import load
from specsample.memory import store as store_lib

# The file that marks a folder as a completely written store.
NAME = 'store.json'
_TOKENS = 'tokens.npz'
_FORMAT = 1


def save_store(
  path: str | os.PathLike[str],
  store: store_lib.Store,
  *,
  target: load.Loaded,
  card: Mapping[str, Any],
) -> None:
  """Writes a folder that `load_store` can read, whole or not at all.

  Args:
    path: the folder, which must not exist yet; may be on gs://.
    store: the texts to save.
    target: the model whose tokens they are.
    card: what else to record, in JSON's types, such as the source of the texts
      and their license. Entries that the library writes itself are replaced.

  Raises:
    ValueError: if `path` exists, the store is empty, or the card cannot be
      written as JSON.
  """
  texts = store_lib.texts_of(store)
  if not texts:
    raise ValueError('the store has no text: build it from at least one')
  tokens = np.concatenate(texts)
  kind = np.uint16 if tokens.max() <= np.iinfo(np.uint16).max else np.uint32
  own = {
    'format': _FORMAT,
    'texts': len(texts),
    'tokens': tokens.size,
    'vocabulary': _vocabulary(target),
  }
  content = card_lib.merged(own, card)
  sizes = np.array([text.size for text in texts], np.uint32)

  def save(path):
    with path.open('wb') as file:
      np.savez_compressed(file, tokens=tokens.astype(kind), sizes=sizes)

  card_lib.write(path, content, _TOKENS, save, card=NAME)


def load_store(
  name_or_path: str | os.PathLike[str],
  target: load.Loaded,
  capacity: int | None = None,
) -> store_lib.Store:
  """Loads a store of a target's tokens.

  Args:
    name_or_path: the name of a store that the library ships, such as
      'smollm2-135m-instruct/store', or a folder that `save_store` wrote, which
      may be on gs://.
    target: the model whose tokenizer encoded the texts.
    capacity: as in `store.build`.

  Raises:
    ValueError: if nothing is there, it is damaged, or has another vocabulary.
  """
  name = files.name_of(name_or_path)
  shipped = card_lib.shipped(NAME)
  folder = files.at(shipped.get(name, name)).expanduser()
  if not (folder / NAME).exists():
    raise ValueError(
      f'{name!r} is neither a folder with a {NAME} nor a store that the '
      'library ships: give the folder of a saved store, or one of '
      f'{sorted(shipped)}'
    )
  card = files.read_json(folder / NAME)
  for entry, value in (
    ('format', _FORMAT),
    ('vocabulary', _vocabulary(target)),
  ):
    if card.get(entry) != value:
      raise ValueError(
        f'{folder / NAME}: {entry} is {card.get(entry)!r}, but it should be '
        f"{value!r}: build the store again, with this target's tokenizer"
      )
  path = folder / _TOKENS
  try:
    if card_lib.sha256(path) != card.get('sha256'):
      raise ValueError(f'it is not the file that {NAME} was written for')
    with path.open('rb') as file, np.load(file) as arrays:
      tokens, sizes = arrays['tokens'], arrays['sizes']
  except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
    raise ValueError(
      f'{path} cannot be read ({error}): build the store again, or download it '
      'again'
    ) from error
  texts = np.split(tokens, np.cumsum(sizes)[:-1])
  return store_lib.build(
    texts, vocab_size=target.model.vocab_size, capacity=capacity
  )


def _vocabulary(target: load.Loaded) -> str:
  """Returns a digest of the tokens in the order of their ids."""
  tokens = target.tokenizer.backend.get_vocab()
  ordered = sorted(tokens.items(), key=lambda item: item[1])
  return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()[:16]
