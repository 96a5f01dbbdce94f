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
  'num_per_token': 'num_experts_per_tok',
  'num_groups': 'n_group',
  'groups_per_token': 'topk_group',
  'num_key_heads': 'linear_num_key_heads',
  'num_value_heads': 'linear_num_value_heads',
}


def own_name(name: str) -> str | None:
  """Returns a tensor's name in `Family.names`, None if it is not read.

  Some folders leave out the `model.` that other names begin with. Old ones hold
  rotary frequencies, which are now computed from the configuration.
  """
  if name.endswith('.rotary_emb.inv_freq'):
    return None
  if name.startswith(('embed_tokens.', 'layers.', 'norm.')):
    return f'model.{name}'
  return name


def of_layers(names: Mapping[str, str]) -> dict[str, str]:
  """Returns `Family.names` of all layers, given those within a layer."""
  return {
    f'layers.{{}}.{ours}': f'model.layers.{{}}.{theirs}'
    for ours, theirs in names.items()
  }


def text_part(config: config_lib.Config) -> config_lib.Config:
  """Returns the configuration of the text model in one of text and images.

  The outer tie_word_embeddings decides, as in transformers, if it is there. The
  configuration of a text model alone is returned as it is.
  """
  text = config.part('text_config')
  if not text.values:
    return config
  key = 'tie_word_embeddings'
  tied = config.get(key, text.get(key))
  return text if tied is None else text.changed({key: tied})


@dataclasses.dataclass(frozen=True)
class Family:
  """The rules for reading a family's configuration and tensors.

  Attributes:
    make: makes the model from the configuration of the text model, in which
      defaults are filled in, and a dtype.
    names: the tensor of each parameter, as for `tensors.fill`; '*' stands for
      the numbers of the experts, whose tensors are stacked.
    own_name: maps a tensor's name in a file to its name in `names`, or to None
      if it is not read.
    divided: given the model and the tensors by the names in `names`, returns
      the tensors, with those that hold several parameters divided, and rows in
      the order of the library.
    check: raises ValueError for values that were converted.
    defaults: the values of keys that config.json leaves out, those of the
      family's class in transformers.
    only: the settings of which only one value is supported.
    text: returns the configuration of the text model alone.
    mtp_prefix: begins the names of a single module for multi-token prediction;
      None if modules are stored as layers after the last one.
  """

  make: Callable[[config_lib.Config, str], transformer.Transformer]
  names: Mapping[str, str]
  own_name: Callable[[str], str | None] = own_name
  divided: Callable[
    [transformer.Transformer, tensors.TensorFile], tensors.Tensors
  ] = lambda model, file: file.tensors()
  check: Callable[[tensors.TensorFile], None] = lambda file: None
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  only: Mapping[str, Any] = dataclasses.field(
    default_factory=lambda: {'hidden_act': 'silu'}
  )
  text: Callable[[config_lib.Config], config_lib.Config] = lambda config: config
  mtp_prefix: str | None = None

  def model(
    self, config: config_lib.Config, dtype: str
  ) -> transformer.Transformer:
    """Returns the model of a config.json."""
    config = self.text(config).filled(self.defaults)
    for key, supported in self.only.items():
      config.only(key, supported)
    try:
      return self.make(config, dtype)
    except ValueError as error:
      if str(error).startswith(config.origin):
        raise
      # Sizes that do not fit each other, by the names of `Transformer`.
      message = str(error)
      for ours, theirs in _KEYS.items():
        message = re.sub(rf'\b{ours}\b', theirs, message)
      raise ValueError(f'{config.origin}: {message}') from error
