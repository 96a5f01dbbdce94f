"""The data and the weights that a training run begins with.

Some shards of each folder are for training, and some are held out.
"""

from collections.abc import Sequence
import dataclasses

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from experiments.training import training as training_lib
from experiments.training_data import batches as batches_lib
from experiments.training_data import data_folder
from experiments.training_data import features
import specsample
from specsample import checks
from specsample import sharding
from specsample.drafters import dflash
from specsample.models import packed
from specsample.types import ArrayLike, Params

# Cut out of the target for the vocabulary of each run.
_VOCABULARY = 'vocabulary'
# Tables [rank, V'] that may have a column for each drafted token.
_OF_TOKENS = (
  ('markov', 'before'),
  ('markov', 'behind'),
  ('selector', 'successor'),
)


def load(
  folders: Sequence[str], target: specsample.Loaded
) -> list[data_folder.Data]:
  """Reads all data in the folders."""
  for folder in folders:
    if folders.count(folder) > 1:
      raise ValueError(f'--data names {folder} twice: give each folder once')
  return [data_folder.load(folder, target) for folder in folders]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Split:
  """The examples to train on, and the held-out examples."""

  train: list[batches_lib.Example]
  held_out: list[batches_lib.Example]
  prompts: list[np.ndarray]  # [n] int32 each, of all held-out dialogues


def split(
  training: training_lib.Training,
  data: Sequence[data_folder.Data],
  vectors: Sequence[Sequence[list[features.Vectors] | None]] | None,
) -> Split:
  """Turns the dialogues into examples.

  `vectors` are the target's, by folder, shard and dialogue; None if they are
  not at hand.
  """
  whole = training.objective.reads_prompt or not training.cache_hidden
  train, held_out, prompts = [], [], []
  nothing = [[None] * len(folder.shards) for folder in data]
  for folder, of_shards in zip(data, vectors or nothing, strict=True):
    to_train, _ = folder.numbers(training.held_out_every)
    greedy = []
    for number, shard in enumerate(folder.shards):
      of_each = of_shards[number] or [{}] * len(shard)
      for dialogue, own in zip(shard, of_each, strict=True):
        example = batches_lib.example(dialogue, own, whole)
        if number in to_train:
          train.append(example)
          continue
        prompts.append(dialogue.tokens[: dialogue.answers[0][0]])
        if dialogue.temperature == 0:
          greedy.append(example)
    held_out += greedy[: training.held_out_answers]
  if not held_out:
    names = ', '.join(str(x.folder) for x in data)
    raise ValueError(
      f'no held-out answer in {names} is greedy: make more data with '
      'Synthesis.greedy_share above 0, or add a folder of greedy answers'
    )
  return Split(train=train, held_out=held_out, prompts=prompts)


def draft_vocabulary(
  split: Split, size: int | None, vocab_size: int
) -> np.ndarray | None:
  """Returns the `size` most frequent answer tokens, ascending; None for all."""
  if size is None:
    return None
  counts = np.zeros(vocab_size, np.int64)
  for example in split.train:
    np.add.at(counts, example.learned, 1)
  # Stable: the tokenizer's earlier merges win among equally frequent tokens.
  return np.sort(np.argsort(-counts, kind='stable')[:size]).astype(np.int32)


def params(training: training_lib.Training, d2t: ArrayLike | None) -> Params:
  """Returns the drafter's own parameters before the first step.

  `d2t` [V'] has the ids of the drafted tokens, None for all.
  """
  drafter = training.drafter
  own = drafter.init_params(
    jax.random.key(training.seed), training.target.params, d2t
  )
  if training.begin_with is None:
    return own
  weights, before = _weights(training)
  own, weights = map(traverse_util.flatten_dict, (own, weights))
  for name in _OF_TOKENS:
    is_of_drafted = before is not None and name in weights
    if is_of_drafted and weights[name].shape[1] == len(before):
      weights[name] = _by_token(weights[name], own[name], before, d2t)
  return traverse_util.unflatten_dict(own | weights)


def _by_token(table, fresh, before, after):
  """Returns a table's columns for other tokens; the new ones' are `fresh`."""
  places = {token: i for i, token in enumerate(np.asarray(before).tolist())}
  index = np.asarray([places.get(x, -1) for x in np.asarray(after).tolist()])
  moved = sharding.replicate(table)[:, np.maximum(index, 0)]
  return jnp.where(index >= 0, moved, fresh)


def check(training: training_lib.Training) -> None:
  """Checks that `begin_with` is a drafter that this run can go on from."""
  if training.begin_with is not None:
    _weights(training)


def _weights(training):
  """Returns the weights to begin with, and the tokens that they draft."""
  name, drafter = training.begin_with, training.drafter
  found = specsample.load_drafter(name, training.target)
  params = packed.plain(found.params)
  weights = {k: v for k, v in params.items() if k != _VOCABULARY}
  before = params.get(_VOCABULARY, {}).get('d2t')
  if type(found.drafter) is not type(drafter):
    if not all(isinstance(x, dflash.DFlash) for x in (found.drafter, drafter)):
      raise ValueError(
        f'Training.begin_with is {name}, which is a '
        f'{type(found.drafter).__name__}, but this run trains a '
        f'{type(drafter).__name__}: name a drafter of that kind'
      )
    # Block drafters share their network; what a kind adds begins untrained.
    names = [x.name for x in dataclasses.fields(dflash.DFlash)]
    drafter = dflash.DFlash(**{x: getattr(drafter, x) for x in names})
    shared = drafter.abstract_params()
    weights = {k: v for k, v in weights.items() if k in shared}
  wanted = drafter.abstract_params()
  vocabulary = {k: v for k, v in wanted.items() if k == _VOCABULARY}
  different = checks.mismatch(drafter, weights | vocabulary)
  if different:
    raise ValueError(
      f'Training.begin_with is {name}, whose weights do not fit the drafter of '
      f'this run ({different}): give both the same settings'
    )
  return weights, before
