"""Families of published models, and how their files are read."""

from collections.abc import Callable, Mapping
import dataclasses
import re
from typing import Any

from specsample.models import config as config_lib
from specsample.models import tensors
from specsample.models import transformer

# The keys of the fields that messages name.
_KEYS = {
  'num_heads': 'num_attention_heads',
  'num_kv_heads': 'num_key_value_heads',
  'num_shared': 'num_kv_shared_layers',
  'sliding_layers': 'layer_types',
  'num_per_token': 'num_experts_per_tok',
  'num_groups': 'n_group',
  'groups_per_token': 'topk_group',
  'num_key_heads': 'linear_num_key_heads',
  'num_value_heads': 'linear_num_value_heads',
}


# Those of tensors that read images and sounds begin with these.
_NOT_OF_TEXT = (
  *('vision_tower.', 'multi_modal_projector.', 'audio_tower.', 'visual.'),
  *('embed_vision.', 'embed_audio.', 'vision_embedder.'),
)


def own_name(name: str) -> str | None:
  """Returns a tensor's name in `Family.names`, None if it is not read.

  The layers are those of the text model in one of text and images. Some folders
  leave out the `model.` that other names begin with. Old ones hold rotary
  frequencies, which are now computed from the configuration.
  """
  if name.removeprefix('model.').startswith(_NOT_OF_TEXT):
    return None
  if name.endswith('.rotary_emb.inv_freq'):
    return None
  name = name.removeprefix('language_model.')
  name = name.replace('model.language_model.', 'model.', 1)
  if name.startswith(('embed_tokens.', 'layers.', 'norm.')):
    return f'model.{name}'
  return name


def of_layers(names: Mapping[str, str]) -> dict[str, str]:
  """Returns `Family.names` of all layers, given those within a layer."""
  return {
    f'layers.{{}}.{ours}': f'model.layers.{{}}.{theirs}'
    for ours, theirs in names.items()
  }


def _text_part(config):
  """Returns the configuration of the text model in one of text and images.

  The outer tie_word_embeddings decides, as in transformers, if it is there. The
  configuration of a text model alone is returned as it is.
  """
  text = config.part('text_config')
  if not text.values:
    return config
  key = 'tie_word_embeddings'
  tied = config.get(key, bool, text.get(key, bool))
  return text if tied is None else text.changed({key: tied})


@dataclasses.dataclass(frozen=True)
class Family:
  """The rules for reading a family's configuration and tensors.

  Attributes:
    fields: returns the fields of the `Transformer`, but the dtype, given the
      configuration of the text model, in which defaults are filled in.
    names: the tensor of each parameter, as for `tensors.fill`; '*' stands for
      the numbers of the experts, whose tensors are stacked.
    parts: given the model, returns the parts of tensors that hold several
      parameters, have rows in another order than the library's, or another
      name than in `names`.
    check: raises ValueError for values that were converted.
    defaults: the values of keys that config.json leaves out, those of the
      family's class in transformers.
    only: the settings of which only one value is supported.
    mtp_prefix: begins the names of a single module for multi-token prediction;
      None if modules are stored as layers after the last one.
  """

  fields: Callable[[config_lib.Config], Mapping[str, Any]]
  names: Mapping[str, str]
  parts: Callable[[transformer.Transformer], tensors.Parts] = lambda model: {}
  check: Callable[[tensors.TensorFile], None] = lambda file: None
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  only: Mapping[str, Any] = dataclasses.field(
    default_factory=lambda: {'hidden_act': 'silu'}
  )
  mtp_prefix: str | None = None

  def model(
    self, config: config_lib.Config, dtype: str
  ) -> transformer.Transformer:
    """Returns the model of a config.json."""
    config = _text_part(config).filled(self.defaults)
    for key, supported in self.only.items():
      config.only(key, supported)
    try:
      return transformer.Transformer(**self.fields(config), dtype=dtype)
    except ValueError as error:
      if str(error).startswith(config.origin):
        raise
      # Sizes that do not fit each other, by the names of `Transformer`.
      message = str(error)
      for ours, theirs in _KEYS.items():
        message = re.sub(rf'\b{ours}\b', theirs, message)
      raise ValueError(f'{config.origin}: {message}') from error
