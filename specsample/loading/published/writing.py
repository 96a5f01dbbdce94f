"""Writing a drafter in a published layout, the reverse of `source`.

The tables of names are those of the readers. What was made is read back, from
memory, before anything is written: a setting or a parameter that would be lost
is refused by its name.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from etils import epath
import jax.numpy as jnp
import numpy as np

from specsample.drafters import trainable
from specsample.loading import card
from specsample.loading import load
from specsample.loading.published import source as source_lib
from specsample.models import config as config_lib
from specsample.models import tensors as tensors_lib
from specsample.types import Array, Params

LAYOUTS = ('huggingface', 'speculators')
# The release of `speculators` whose configurations are written.
_VERSION = '0.9.0'
# Settings that do not change what is drafted, and those that a file holds in
# another form: the unembedding of the tokens that are drafted is its own.
_NOT_COMPARED = {
  *('model', 'num_draft_tokens', 'most_kept', 'draft_vocab_size'),
  *('own_unembedding', 'layer_config', 'shares_blocks', 'reads_all_tokens'),
}
# Fields of a `Transformer` that do not describe its layers.
_NOT_OF_LAYERS = {
  *('vocab_size', 'num_layers', 'max_length', 'num_tokens', 'tie_embeddings'),
  *('logit_softcap', 'embedding_scale', 'has_int8_cache', 'dtype'),
  *('sliding_window', 'sliding_layers', 'query_scale'),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A drafter to write.

  Attributes:
    drafter: the drafter.
    params: its own parameters.
    target: the model that it drafts for.
    target_name: where others find the target: a repository of the hub or a
      folder; None if neither is known.
    architectures: those of the target's config.json, () if they are not known.
    layout: the family of layouts, one of `LAYOUTS`.
  """

  drafter: Any
  params: Params
  target: load.Loaded
  target_name: str | None
  architectures: tuple[str, ...]
  layout: str

  @property
  def of_speculators(self) -> bool:
    """Whether the layout is that of `speculators`."""
    return self.layout == 'speculators'

  def no_room(self, what: str, remedy: str) -> ValueError:
    """Returns the error for something that the layout cannot hold."""
    kind = type(self.drafter).__name__
    return ValueError(
      f'{what}: the {self.layout} layout of {kind} has no room for it: {remedy}'
    )

  def values(self) -> dict[str, np.ndarray]:
    """Returns the parameters by name, [in, out], on the host."""
    leaves = tensors_lib.by_name(self.params)
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}

  def name_of_target(self) -> str:
    """Returns the target's name; raises ValueError if there is none."""
    if self.target_name is None:
      raise ValueError(
        f'the {self.layout} layout of {type(self.drafter).__name__} names the '
        f'target, but {self.target.name or "this one"!r} is neither a '
        'repository of the hub nor a folder with config.json: give '
        "target_name='organisation/name'"
      )
    return self.target_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
  """The files of a drafter.

  Attributes:
    config: what config.json holds.
    weights: the tensors of each file of weights, [out, in].
    others: the content of other JSON files.
    copied: the origins of files that are copied.
    is_of_target: whether the files are a target's, with the drafter's modules.
  """

  config: Mapping[str, Any]
  weights: Mapping[str, Mapping[str, np.ndarray]]
  others: Mapping[str, Mapping[str, Any]] = dataclasses.field(
    default_factory=dict
  )
  copied: Mapping[str, epath.Path] = dataclasses.field(default_factory=dict)
  is_of_target: bool = False


def to_bfloat16(values: Array | np.ndarray) -> np.ndarray:
  """Returns an array [in, out] as it is stored: [out, in] in bfloat16."""
  return np.asarray(values).astype(jnp.bfloat16).T


def named(request: Request, table: source_lib.Table) -> dict[str, np.ndarray]:
  """Returns the tensors of the parameters that a table names."""
  found = {}
  for own, values in request.values().items():
    try:
      name, numbers = source_lib.row(table, own)
    except KeyError:
      raise request.no_room(
        f'params has {own} of shape {values.shape}', 'train without it'
      ) from None
    if isinstance(name, str):
      found[name.format(*numbers)] = to_bfloat16(values)
  return found


def vocabulary(request: Request) -> dict[str, np.ndarray]:
  """Returns the unembedding and, of a draft vocabulary, d2t and t2d.

  There are none if the drafter drafts all tokens with the target's unembedding.
  """
  drafter, values = request.drafter, request.values()
  if 'vocabulary.unembedding' not in values:
    return {}
  softcap = drafter.model.logit_softcap
  if softcap is not None and not drafter.own_unembedding:
    raise request.no_room(
      f"the target's logit_softcap = {softcap}, which its draft vocabulary has "
      'too',
      'train with draft_vocab_size = None',
    )
  unembedding = to_bfloat16(values['vocabulary.unembedding'])
  found = {source_lib.VOCABULARY['vocabulary.unembedding']: unembedding}
  ids = values.get('vocabulary.d2t')
  if ids is not None:
    found['d2t'] = ids.astype(np.int64) - np.arange(len(ids))
    found['t2d'] = np.isin(np.arange(drafter.model.vocab_size), ids)
  return found


def for_speculators(
  request: Request, kind: str, architecture: str
) -> dict[str, Any]:
  """Returns the entries that all configurations of `speculators` have."""
  name = request.name_of_target()
  return {
    'architectures': [architecture],
    'speculators_model_type': kind,
    'speculators_version': _VERSION,
    'speculators_config': {
      'algorithm': kind,
      'proposal_methods': [
        {
          'proposal_type': 'greedy',
          'speculative_tokens': request.drafter.num_draft_tokens,
        }
      ],
      'default_proposal_method': 'greedy',
      'verifier': {
        'name_or_path': name,
        'architectures': list(request.architectures),
      },
    },
    'dtype': 'bfloat16',
  }


def feature_layers(request: Request) -> tuple[int, ...]:
  """Returns the layers that are read."""
  found, last = request.drafter.feature_layers, request.drafter.model.num_layers
  if last - 1 in found:
    raise request.no_room(
      f'feature_layers = {found} with {last - 1}, the last layer, whose output '
      'others provide only after the norm',
      'train with earlier layers',
    )
  if request.of_speculators and len({*found}) < len(found):
    raise request.no_room(
      f'feature_layers = {found} with a layer twice', 'train with others'
    )
  return found


def as_source(request: Request, content: Content) -> source_lib.Source:
  """Returns what a reader would find in a folder with the content."""
  stored: dict[str, Any] = {}
  for of_file in content.weights.values():
    stored |= of_file
  config = config_lib.Config(content.config, 'config.json')
  # Without the target's weights, because only the shapes are compared.
  target = load.Loaded(request.drafter.model, None, None)
  num_draft_tokens = request.drafter.num_draft_tokens
  return source_lib.Source(
    epath.Path('.'), config, stored, target, num_draft_tokens
  )


def check_settings(request: Request, read: trainable.Trainable) -> None:
  """Raises ValueError unless the drafter that is read drafts alike."""
  given, found = _settings(request.drafter), _settings(read)
  for name, value in given.items():
    if value != found[name]:
      raise request.no_room(
        f'{name} = {value!r}, which would be read as {found[name]!r}',
        'train without it, or choose another layout',
      )


def _settings(drafter) -> dict[str, Any]:
  """Returns what decides how a drafter drafts, by name."""
  found = card.fields_of(drafter)
  of_drafter = _without(found, _NOT_COMPARED)
  if 'layer_config' not in found:
    return of_drafter
  shape, windows = drafter.shape, drafter.windows
  of_layers = _without(card.fields_of(shape), _NOT_OF_LAYERS)
  if not any(windows):
    del of_layers['sliding_rope_theta']
  of_layers['query_scale'] = shape.query_scale or shape.head_dim**-0.5
  return of_drafter | of_layers | {'windows': windows}


def _without(values, names):
  return {name: x for name, x in values.items() if name not in names}
