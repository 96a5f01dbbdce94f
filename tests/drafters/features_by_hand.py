"""Drafters that continue features, one sequence at a time, in NumPy."""

import numpy as np


def _norm(params, x):
  scale = np.asarray(params['scale'], np.float64)
  return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5) * scale


def _linear(params, x):
  y = x @ np.asarray(params['kernel'], np.float64)
  return y + np.asarray(params['bias']) if 'bias' in params else y


def _rotate(x):
  """Rotates heads x [H, T, size], token t by its position t."""
  size = x.shape[-1] // 2
  frequencies = 10_000.0 ** (-np.arange(size) / size)
  angles = np.arange(x.shape[1])[:, None] * frequencies
  pairs = x[..., :size] + 1j * x[..., size:]
  pairs = pairs * np.exp(1j * angles)
  return np.concatenate([pairs.real, pairs.imag], axis=-1)


def _attend(params, x, model):
  size = len(x)
  heads = lambda name: (
    _linear(params[name], x).reshape(size, -1, model.head_dim).swapaxes(0, 1)
  )
  query, key = _rotate(heads('query')), _rotate(heads('key'))
  value = heads('value')
  mixed = []
  for i, of_head in enumerate(query):
    group = i * model.num_kv_heads // model.num_heads
    scores = of_head @ key[group].T / np.sqrt(model.head_dim)
    scores = np.where(np.tri(size, dtype=bool), scores, -np.inf)
    if model.sliding_window is not None:
      far = np.tri(size, k=-model.sliding_window, dtype=bool)
      scores = np.where(far, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed.append(weights @ value[group] / weights.sum(axis=-1, keepdims=True))
  return _linear(params['out'], np.concatenate(mixed, axis=-1))


def _mlp(params, x):
  gate = _linear(params['gate'], x)
  hidden = gate / (1 + np.exp(-gate)) * _linear(params['up'], x)
  return _linear(params['down'], hidden)


def _outputs(own, model, embedded, features):
  """Returns all outputs for `embedded` [T, D] and `features` [T, D]."""
  layer = own['layer']
  project = lambda *x: _linear(
    own['project']['linear'], np.concatenate(x, axis=-1)
  )
  if 'feature_norm' not in own:  # EAGLE
    x = read = project(embedded, features)
  else:
    embedded = _norm(own['embedding_norm'], embedded)
    normed = _norm(own['feature_norm'], features)
    if 'attention_norm' in layer:  # multi-token prediction
      x = project(embedded, normed)
      read = _norm(layer['attention_norm'], x)
    else:  # EAGLE-3
      x = features
      read = np.concatenate([embedded, normed], axis=-1)
  x = x + _attend(layer['attention'], read, model)
  return x + _mlp(layer['mlp'], _norm(layer['mlp_norm'], x))


def vectors(params, drafter, output, tokens, length, num_drafts):
  """Returns the vectors [K, D] to unembed for drafts after tokens [:length].

  Args:
    params: the whole tree.
    drafter: Eagle, Eagle3 or MTP.
    output: the target's output for those tokens.
    tokens: the text, followed by the draft tokens.
    length: at least 2.
    num_drafts: K.
  """
  own, model = params['drafter'], drafter.model
  wide = lambda x: np.asarray(x, np.float64)
  features = wide(output.hidden[0])
  if output.features:
    of_layers = np.concatenate([wide(x[0]) for x in output.features], axis=-1)
    features = _linear(own['project']['linear'], of_layers)
  features = features[: length - 1]
  embedded = wide(params['target']['embedding']).T[np.asarray(tokens)]
  modules = list(own['layers'].values()) if 'layers' in own else [own]
  found = []
  for i in range(num_drafts):
    number = min(i, len(modules) - 1)
    module = modules[number]
    entries = embedded[number + 1 :][: len(features)]
    outputs = _outputs(module, model, entries, features)
    last = outputs[-1:]
    found.append(_norm(module['norm'], last) if 'norm' in module else last)
    if module is modules[-1]:
      features = np.concatenate([features, last])
    else:
      features = outputs
  return np.concatenate(found)
