"""Every family against `transformers` on random tiny models."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

import specsample
from specsample import drafters
from specsample import verify
from specsample.models import config as config_lib
from specsample.models import decoder_layer
from specsample.models import huggingface
from specsample.models import layers
from tests.models import random_models

_BATCH, _LENGTH = 2, 48


@pytest.fixture(scope='module', autouse=True)
def _one_torch_thread():
  """Uses one torch thread: several busy-wait, even if others need the cores."""
  before = torch.get_num_threads()
  torch.set_num_threads(1)
  yield
  torch.set_num_threads(before)


@pytest.fixture(scope='module', params=list(random_models.CONFIGS))
def pair(request, tmp_path_factory):
  """A loaded model, its parameters, and what transformers computes."""
  folder = tmp_path_factory.mktemp(request.param)
  reference = random_models.reference(request.param)
  reference.save_pretrained(folder)
  tokens = torch.randint(
    0, random_models.SIZES['vocab_size'], (_BATCH, _LENGTH)
  )
  with torch.no_grad():
    outputs = reference(tokens, output_hidden_states=True)
  loaded = specsample.load(folder)
  return loaded.model, loaded.params, tokens.numpy(), outputs


def _apply(model):
  return jax.jit(model.apply, static_argnames='features')


def _close(found, expected, model):
  # Norms of small queries and keys amplify rounding: so far, transformers'
  # own logits differ between a prefill and one token at a time.
  atol = 1e-3 if model.is_recurrent else 1e-4
  np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.nightly(but=('llama', 'qwen3_moe', 'deepseek_v3'))
def test_prefill_equals_transformers(pair):
  model, params, tokens, outputs = pair
  logits = outputs.logits.numpy()
  assert np.std(logits) > 0.5
  cache = model.init_cache(_BATCH, _LENGTH)
  found, _ = _apply(model)(params, tokens, cache, features=(-1, 0, 1))
  _close(found.logits, logits, model)
  _close(found.hidden, outputs.hidden_states[-1].numpy(), model)
  for feature, entering in zip(
    found.features, outputs.hidden_states[:3], strict=True
  ):
    _close(feature, entering.numpy(), model)


@pytest.mark.slow
def test_decoding_over_wrong_drafts_equals_transformers(pair):
  model, params, tokens, outputs = pair
  apply, fed = _apply(model), 3
  cache = model.init_cache(_BATCH, _LENGTH + 2, max_new=fed)
  has_window = model.sliding_window is not None
  assert bool(cache.rings) == has_window
  lengths = np.asarray([0, 4])
  _, cache = apply(params, tokens[:, :fed], cache)
  cache = model.commit(cache, jnp.asarray([0, fed]))
  _, cache = apply(params, np.roll(tokens, -fed, 1)[:, :fed], cache)
  cache = model.commit(cache, jnp.asarray(lengths))
  rows = np.arange(_BATCH)
  while lengths.max() < _LENGTH:
    inputs = np.stack([tokens[rows, lengths]] * fed, axis=1)
    inputs[:, 1:] = (inputs[:, 1:] + 5 + lengths[:, None]) % model.vocab_size
    found, cache = apply(params, inputs, cache)
    _close(found.logits[:, 0], outputs.logits.numpy()[rows, lengths], model)
    lengths = lengths + 1
    cache = model.commit(cache, jnp.asarray(lengths))


@pytest.mark.parametrize(
  'pair', ['gemma4', 'gpt_oss', 'qwen3_5'], indirect=True
)
def test_300_tokens_with_drafts_are_those_of_a_plain_loop(pair):
  model, params, tokens, _ = pair
  model, prompts = dataclasses.replace(model, max_length=320), tokens[:, :5]

  @jax.jit
  def plain(params):
    cache = model.init_cache(_BATCH, 320, max_new=5)
    output, cache = model.apply(params, prompts, cache)
    first = output.logits[:, -1].argmax(-1)
    cache = model.commit(cache, jnp.full(_BATCH, 5))

    def step(carry, length):
      token, cache = carry
      output, cache = model.apply(params, token[:, None], cache)
      cache = model.commit(cache, jnp.full(_BATCH, length + 1))
      return (output.logits[:, 0].argmax(-1), cache), token

    _, found = jax.lax.scan(step, (first, cache), 5 + jnp.arange(300))
    return found.T

  output = specsample.generate(
    {'target': params},
    *(prompts, np.full(_BATCH, 5), jax.random.key(0)),
    model=model,
    drafter=drafters.Ngram(num_draft_tokens=4, min_ngram=1),
    verify=verify.chain,
    sampling=specsample.Sampling(temperature=0.0),
    max_new_tokens=300,
  )
  np.testing.assert_array_equal(output.tokens, plain(params))
  stats = specsample.stats.summarize(output)
  assert 0 < stats.kept < stats.judged


@pytest.mark.slow
def test_embed_and_unembed_are_the_ends_of_the_network(pair):
  model, params, tokens, outputs = pair
  embedded = model.embed(params, jnp.asarray(tokens))
  _close(embedded, outputs.hidden_states[0].numpy(), model)
  last = jnp.asarray(outputs.hidden_states[-1].numpy())
  _close(model.unembed(params, last), outputs.logits.numpy(), model)


def test_rows_of_deepseek_that_are_no_pairs_are_refused(tmp_path):
  config = transformers.DeepseekV3Config(
    **random_models.SIZES | random_models.LATENT | random_models.EXPERTS,
    rope_interleave=False,
  )
  config.save_pretrained(tmp_path)
  with pytest.raises(
    ValueError, match='rope_interleave is False, but only True is'
  ):
    specsample.load(tmp_path)


def _model_of(name, changes):
  values = random_models.CONFIGS[name].to_dict() | changes
  config = config_lib.Config(values, 'config.json')
  return huggingface.family_of(config).model(config, 'float32')


@pytest.mark.parametrize(
  ('name', 'reference'),
  [
    ('gpt_oss', modeling_gpt_oss.GptOssRMSNorm),
    ('gemma4', modeling_gemma4.Gemma4RMSNorm),
    ('llama', modeling_llama.LlamaRMSNorm),
  ],
)
def test_norms_round_to_bfloat16_where_transformers_does(name, reference):
  model = dataclasses.replace(_model_of(name, {}), dtype='bfloat16')
  keys = layers.random_keys(jax.random.key(0))
  made = decoder_layer.DecoderLayer(model, keys, 0)
  norms = [x for _, x in nnx.iter_graph(made) if isinstance(x, layers.RMSNorm)]
  assert len(norms) > 1
  assert {x.is_wide for x in norms} == {name != 'llama'}
  rng = np.random.default_rng(0)
  rows, scale = rng.normal(size=(64, 32)), rng.uniform(0.5, 1.5, size=32)
  theirs = reference(32, eps=model.norm_eps).to(torch.bfloat16)
  norm = layers.norm_of(model, 32)
  rows, scale = (torch.tensor(x, dtype=torch.bfloat16) for x in (rows, scale))
  with torch.no_grad():
    theirs.weight.copy_(scale)
    expected = theirs(rows).float().numpy()
  as_jax = lambda x: jnp.asarray(x.float().numpy(), jnp.bfloat16)
  norm.scale.set_value(as_jax(scale))
  found = np.asarray(norm(as_jax(rows)), np.float32)
  # Rounded in another place, some 30% would differ.
  assert (found != expected).mean() < 0.01


def test_counts_of_layers_stay_within_the_model():
  """Otherwise a damaged one would be counted through, and fill the memory."""
  changes = {'max_window_layers': -5, 'layer_types': None}
  assert _model_of('qwen2_window', changes).sliding_layers == (0, 1, 2)
  experts = _model_of('deepseek_v3', {'first_k_dense_replace': 9}).experts
  assert experts.dense_layers == (0, 1, 2)


@pytest.mark.parametrize(
  ('given', 'expected'), [(40_960, 131_072), (200_000, 200_000)]
)
def test_yarn_extends_the_longest_text(given, expected):
  scaling = {
    'rope_type': 'yarn',
    'factor': 4.0,
    'original_max_position_embeddings': 32_768,
  }
  changes = {'rope_scaling': scaling, 'rope_parameters': None}
  model = _model_of('qwen3', {**changes, 'max_position_embeddings': given})
  assert model.max_length == expected
