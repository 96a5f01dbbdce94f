"""Every key of config.json against `transformers`, for every family.

A key that is absent, null or has another value gives the model that
transformers makes of it, or is refused by its name.
"""

from collections.abc import Iterator
import copy
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import specsample
from specsample.models import config as config_lib
from specsample.models import huggingface
from tests.models import random_models

_FAMILIES = (
  *('llama', 'mistral', 'mixtral', 'qwen2_window', 'qwen3', 'qwen3_moe'),
  *('qwen3_next', 'qwen3_5', 'qwen3_5_moe', 'gemma2', 'gemma3', 'gemma4'),
  *('gemma4_experts', 'gpt_oss', 'deepseek_v3'),
)
# They do not say what is computed from tokens.
_OTHER = """
  architectures attention_dropout bos_token_id chunk_size_feed_forward dtype
  eos_token_id id2label initializer_range is_encoder_decoder label2id model_type
  output_attentions output_hidden_states output_router_logits pad_token_id
  problem_type return_dict router_aux_loss_coef router_jitter_noise
  transformers_version use_cache
"""
# `transformers` reads it from the parameters too; see test_huggingface.
_TIED = 'tie_word_embeddings'
_ABSENT = object()
_YARN = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'original_max_position_embeddings': 16,
}
# Spellings of other versions, and of other families.
_ADDED = (
  (('rope_scaling',), _YARN),
  (('rope_scaling',), {'type': 'linear', 'factor': 4.0}),
  (('rope_theta',), 123.0),
  (('partial_rotary_factor',), 0.5),
  (('rope_parameters', 'partial_rotary_factor'), 0.5),
)
_Path = tuple[str, ...]


def _others(value: Any) -> list[Any]:
  """Returns other values of the same type."""
  match value:
    case bool():
      return [not value]
    case int():
      return [2 * value]
    case float():
      return [2 * value + 0.25]
    case str():
      return ['gelu']
    case list():
      return [value[::-1]]
  return []


def _variants(values: dict[str, Any], path: _Path = ()) -> Iterator[tuple]:
  """Yields paths of keys and what to put there."""
  for key, value in values.items():
    if key in (*_OTHER.split(), _TIED):
      continue
    at = (*path, key)
    yield at, _ABSENT
    yield at, None
    if isinstance(value, dict):
      yield from _variants(value, at)
    else:
      yield from ((at, other) for other in _others(value))


def _changed(values: dict[str, Any], path: _Path, value: Any):
  found = copy.deepcopy(values)
  part = found
  for key in path[:-1]:
    part = part.setdefault(key, {})
  if value is _ABSENT:
    part.pop(path[-1], None)
  else:
    part[path[-1]] = value
  return found


class _Reference:
  """What `transformers` computes with the same parameters."""

  def __init__(self, name: str, folder):
    model = random_models.reference(name)
    model.save_pretrained(folder)
    self.parameters = model.state_dict()
    self.values = json.loads((folder / 'config.json').read_text())
    self.tokens = torch.randint(0, random_models.SIZES['vocab_size'], (2, 32))
    self.defaults = type(model.config)().to_dict()

  def logits(self, values: dict[str, Any]) -> np.ndarray | None:
    """Returns the logits; None if the configuration is refused."""
    of_kind = transformers.CONFIG_MAPPING[values['model_type']]
    try:
      config = of_kind.from_dict(copy.deepcopy(values))
      config._attn_implementation = 'eager'
      config._experts_implementation = 'eager'
      model = transformers.AutoModelForCausalLM.from_config(config).eval()
      model.load_state_dict(self.parameters)
      with torch.no_grad():
        return model(self.tokens).logits.numpy()
    except Exception:
      return None


@pytest.mark.parametrize('name', _FAMILIES)
def test_a_key_means_what_it_means_to_transformers(name, tmp_path):
  reference = _Reference(name, tmp_path)
  expected = reference.logits(reference.values)
  made, _ = _read(reference.values)
  failures = []
  everything = reference.values | {
    key: value
    for key, value in reference.defaults.items()
    if key not in reference.values and value is not None
  }
  for path, value in (*_variants(everything), *_ADDED):
    values = _changed(reference.values, path, value)
    theirs = reference.logits(values)
    model, error = _read(values)
    where = f'{".".join(path)} = {"absent" if value is _ABSENT else value!r}'
    if theirs is None:
      continue
    if model is None:
      if not set(path) & set(_words(error)):
        failures.append(f'{where}: {error}')
    elif dataclasses.replace(model, max_length=made.max_length) == made:
      if not np.allclose(theirs, expected, rtol=0, atol=1e-4):
        failures.append(f'{where}: nothing changes, but there it does')
    else:
      found = _logits(tmp_path, values, reference)
      if not np.allclose(found, theirs, rtol=0, atol=2e-3):
        failures.append(f'{where}: another model')
  assert not failures, '\n'.join(failures)


@pytest.mark.parametrize(
  ('name', 'outer'),
  [
    ('gemma3', 'gemma3'),
    ('gemma4', 'gemma4'),
    ('gemma4_experts', 'gemma4_unified'),
    ('qwen3_5', 'qwen3_5'),
    ('qwen3_5_moe', 'qwen3_5_moe'),
  ],
)
def test_a_key_means_the_same_beside_images(name, outer):
  values = random_models.reference(name).config.to_dict()
  nested = lambda text: {
    'model_type': outer,
    'text_config': text,
    'vision_config': {'hidden_size': 8},
  }
  assert _read(nested(values))[0] is not None
  for path, value in (*_variants(values), *_ADDED):
    text = _changed(values, path, value)
    assert _read(nested(text)) == _read(text), (path, value)
  # Without another value outside, the text's own decides.
  for tied in (False, True):
    text = values | {_TIED: tied}
    for outside, expected in ((None, tied), (False, False), (True, True)):
      model, _ = _read(nested(text) | {_TIED: outside})
      assert model.tie_embeddings == expected


@pytest.mark.parametrize('kind', config_lib._KINDS)
def test_a_value_of_a_wrong_type_is_refused(kind):
  values = 'x', 7, 1.5, True, ['x'], [1], [True], {}
  right = {
    float: (7, 1.5),
    **{list[int]: ([1],), list[str]: (['x'],)},
    **{int: (7,), bool: (True,), str: ('x',), dict: ({},)},
  }[kind]
  of = lambda value: config_lib.Config({'key': value}, 'config.json')
  for value in values:
    if repr(value) in map(repr, right):
      assert of(value).get('key', kind) == value
      continue
    with pytest.raises(ValueError, match='expected') as caught:
      of(value).get('key', kind)
    for word in ('config.json', f'key is {value!r}'):
      assert word in str(caught.value)
  assert of(None).get('key', kind, 5) == 5


def _read(values):
  """Returns the model, or None and what was refused."""
  config = config_lib.Config(values, 'config.json')
  try:
    return huggingface.family_of(config).model(config, 'float32'), ''
  except ValueError as error:
    return None, str(error)


def _words(text):
  return text.replace(',', ' ').replace(':', ' ').split()


def _logits(folder, values, reference):
  (folder / 'config.json').write_text(json.dumps(values))
  loaded = specsample.load(folder)
  cache = loaded.model.init_cache(*reference.tokens.shape)
  output, _ = loaded.model.apply(loaded.params, reference.tokens.numpy(), cache)
  return np.asarray(output.logits)
