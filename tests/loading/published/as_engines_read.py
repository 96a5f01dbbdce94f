"""Exported drafters as an engine reads them: config.json, tensors and NumPy.

Written from the layouts alone, for layers without windows.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy

from tests.loading.published import by_hand


def _open(folder: pathlib.Path):
  config = json.loads((folder / 'config.json').read_text())
  tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
  return config, config.get('transformer_layer_config', config), tensors


def _read(tensors, config, found, target):
  """Returns (token embeddings, how vectors become logits of all tokens)."""
  head = tensors.get('lm_head.weight', by_hand.unembedding(target))
  ids = np.arange(len(head)) + by_hand.wide(tensors.get('d2t', 0)).astype(int)
  assert config['draft_vocab_size'] == len(head)
  if 't2d' in tensors:
    np.testing.assert_array_equal(np.flatnonzero(tensors['t2d']), np.sort(ids))

  def to_logits(rows):
    logits = np.full((len(rows), found.logits.shape[1]), -np.inf)
    logits[:, ids] = rows @ by_hand.wide(head).T
    return logits

  return by_hand.embedding(target), to_logits, ids


def eagle3(folder, found, target):
  """Returns the logits [K, V] after a text and the drafts of a round."""
  config, layer, tensors = _open(folder)
  name = 'midlayer' if layer is config else 'layers.0'
  eps, size, theta = (
    layer[key] for key in ('rms_norm_eps', 'head_dim', 'rope_theta')
  )
  norm = lambda of, x: by_hand.norm(tensors, of, x, eps)
  embedded, to_logits, _ = _read(tensors, config, found, target)
  parts, eagle = found.features, config.get('eagle_config', config)
  if config.get('fc_norm'):
    parts = [norm(f'fc_norm.{i}', x) for i, x in enumerate(parts)]
  joined = np.concatenate(parts, axis=-1)
  if eagle['norm_before_fc']:
    joined = norm('input_norm', joined)
  features = by_hand.linear(tensors, 'fc', joined)
  tokens, rows = [*found.text, *found.drafts], []
  for _ in found.drafts:
    ids = tokens[1 : len(features) + 1]
    normed = norm(f'{name}.hidden_norm', features)
    first = norm(f'{name}.input_layernorm', embedded[ids])
    x = normed if config.get('norm_before_residual') else features
    x = x + by_hand.causal_attention(
      tensors,
      f'{name}.self_attn',
      np.concatenate([first, normed], axis=-1),
      size,
      theta,
      eps,
    )
    normed = norm(f'{name}.post_attention_layernorm', x)
    last = (x + by_hand.mlp(tensors, f'{name}.mlp', normed))[-1:]
    rows.append(norm('norm', last))
    fed_back = rows[-1] if config.get('norm_output') else last
    features = np.concatenate([features, fed_back])
  return to_logits(np.concatenate(rows))


def block(folder, found, target):
  """Returns the logits [K, V] of DFlash, or of DSpark with a vanilla head."""
  config, layer, tensors = _open(folder)
  settings = config | config.get('dflash_config', {})
  eps, size, theta = (
    layer[key] for key in ('rms_norm_eps', 'head_dim', 'rope_theta')
  )
  norm = lambda of, x: by_hand.norm(tensors, of, x, eps)
  embedded, to_logits, ids = _read(tensors, config, found, target)
  start, count = len(found.text) - 1, settings['block_size']
  fused = by_hand.linear(tensors, 'fc', np.concatenate(found.features, axis=-1))
  fused = norm('hidden_norm', fused)
  masks = [settings['mask_token_id']] * (count - 1)
  x = embedded[[found.text[-1], *masks]]
  for i in range(layer['num_hidden_layers']):
    name = f'layers.{i}'

    def heads(part, rows, first, of=name):
      y = by_hand.linear(tensors, f'{of}.self_attn.{part}_proj', rows)
      y = by_hand.heads(y, size)
      if part == 'v':
        return y
      y = norm(f'{of}.self_attn.{part}_norm', y)
      return by_hand.rotate(y, first + np.arange(len(rows)), theta)

    read = norm(f'{name}.input_layernorm', x)
    key, value = (
      np.concatenate([heads(p, fused, 0), heads(p, read, start)], axis=1)
      for p in 'kv'
    )
    seen = np.ones((count, start + count), bool)
    mixed = by_hand.attend(heads('q', read, start), key, value, seen)
    x = x + by_hand.linear(tensors, f'{name}.self_attn.o_proj', mixed)
    read = norm(f'{name}.post_attention_layernorm', x)
    x = x + by_hand.mlp(tensors, f'{name}.mlp', read)
  logits = to_logits(norm('norm', x)[-len(found.drafts) :])
  if 'markov_head.markov_w1.weight' in tensors:
    before = [found.text[-1], *found.drafts[:-1]]
    latent = by_hand.wide(tensors['markov_head.markov_w1.weight'])[before]
    logits[:, ids] += by_hand.linear(tensors, 'markov_head.markov_w2', latent)
  return logits


def medusa(folder, found, target):
  """Returns the logits [K, V] of Medusa in vLLM's names."""
  config, _, tensors = _open(folder)
  logits = np.full(found.logits.shape, -np.inf)
  ids = tensors.get('token_map', np.arange(config['vocab_size']))
  assert config['truncated_vocab_size'] == len(ids)
  assert config['num_heads'] == len(logits)
  for i, row in enumerate(logits):
    x = found.hidden[-1]
    for j in range(config['num_hidden_layers']):
      name = f'blocks.{i}.layers.{j}'
      x = x + by_hand.silu(by_hand.linear(tensors, name, x))
    row[ids] = by_hand.linear(tensors, f'lm_heads.{i}', x)
  return logits
