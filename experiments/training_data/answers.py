"""The answers in data folders, as lists of token ids."""

from collections.abc import Sequence
import itertools

from experiments.training_data import data_folder
from experiments.training_data import dialogues as dialogues_lib
import specsample


def of_folders(
  target: specsample.Loaded, folders: Sequence[str]
) -> tuple[list[list[int]], list[str]]:
  """Returns the target's answers in folders of make_data, and their digests.

  Raises:
    ValueError: if a folder is missing, damaged or made with another target.
  """
  data = [data_folder.load_for(folder, target) for folder in folders]
  texts = [
    dialogue.tokens[start:end].tolist()
    for of_folder in data
    for dialogue in itertools.chain(*of_folder.shards)
    if dialogue.source != dialogues_lib.Source.TEXT
    for start, end in dialogue.answers
  ]
  return texts, [of_folder.digest() for of_folder in data]
