"""PARD: a language model's folder whose config.json names a mask."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import specsample
from specsample import drafters
from specsample import testing
from tests.loading.published import by_hand

_V, _MASK, _K = 32, 29, 3
_MODEL = testing.tiny_llama(vocab_size=_V)
_TARGET = specsample.Loaded(_MODEL, _MODEL.init(jax.random.key(0)), None)
_PROMPT = [3, 1, 4, 9, 2]
_CONFIG = transformers.LlamaConfig(
  vocab_size=_V,
  hidden_size=16,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  intermediate_size=24,
  max_position_embeddings=64,
  initializer_range=0.3,
)
_OWN = {'spd_type': 'pard', 'pard_token': _MASK}


def _write(folder, own=_OWN, config=_CONFIG):
  torch.manual_seed(0)
  model = transformers.LlamaForCausalLM(config)
  model.save_pretrained(folder)
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | own))
  return model


def test_it_drafts_as_transformers_goes_on_from_masks(tmp_path):
  model = _write(tmp_path)
  loaded = specsample.load_drafter(tmp_path, _TARGET, _K)
  assert type(loaded.drafter) is drafters.PARD
  assert loaded.card == {}
  for found in by_hand.two_rounds(loaded, _TARGET, _PROMPT, 1, 7):
    fed = torch.tensor([[*found.text, *[_MASK] * (_K - 1)]])
    with torch.no_grad():
      expected = model(fed).logits[0, -_K:].numpy()
    np.testing.assert_allclose(found.logits, expected, atol=1e-4)


def test_the_settings_are_those_of_the_folder_and_the_target(tmp_path):
  _write(tmp_path)
  model = dataclasses.replace(_MODEL, dtype='bfloat16')
  half = specsample.Loaded(model, model.init(jax.random.key(0)), None)
  loaded = specsample.load_drafter(tmp_path, half)
  assert loaded.drafter.num_draft_tokens == 8
  assert loaded.drafter.mask_token_id == _MASK
  assert loaded.drafter.model.dtype == 'bfloat16'
  assert loaded.params['norm']['scale'].dtype == jnp.bfloat16


@pytest.mark.parametrize(
  ('own', 'message'),
  [
    (
      _OWN | {'pard_token': None},
      'has no pard_token, and .* add the key pard_',
    ),
    (_OWN | {'pard_token': _V}, 'pard_token is 32, .* for another target'),
    # Without the type, it is a model like any other, and has no modules.
    ({'pard_token': _MASK}, 'num_nextn_predict_layers is None, .* PARD or Gem'),
  ],
)
def test_a_folder_that_names_no_mask_is_refused(tmp_path, own, message):
  _write(tmp_path, own)
  with pytest.raises(ValueError, match=message):
    specsample.load_drafter(tmp_path, _TARGET)


def test_a_draft_of_no_tokens_is_refused(tmp_path):
  _write(tmp_path)
  with pytest.raises(ValueError, match='num_draft_tokens is 0'):
    specsample.load_drafter(tmp_path, _TARGET, 0)


def test_another_vocabulary_without_tokenizers_is_refused(tmp_path):
  config = transformers.LlamaConfig.from_dict(
    _CONFIG.to_dict() | {'vocab_size': _V + 8}
  )
  _write(tmp_path, config=config)
  with pytest.raises(ValueError, match='without a tokenizer'):
    specsample.load_drafter(tmp_path, _TARGET)
