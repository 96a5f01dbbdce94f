"""Gemma 4's assistants, as Google publishes them."""

from specsample import drafters
from specsample import files
from specsample.loading.published import source as source_lib
from specsample.models import config as config_lib
from specsample.models import gemma

MARK = 'pre_projection.weight'
_TABLE = {
  'project.kernel': MARK,
  'back.kernel': 'post_projection.weight',
  'norm.scale': 'norm.weight',
  'ordered.clusters.kernel': 'masked_embedding.centroids.weight',
  'ordered.ids': 'masked_embedding.token_ordering',
} | {
  ours: theirs.removeprefix('model.')
  for ours, theirs in gemma.GEMMA4.names.items()
  if ours.startswith('layers.{}.')
}
# Without a number in generation_config.json.
_NUM_DRAFT_TOKENS = 4


def plan(source: source_lib.Source) -> source_lib.Plan:
  """Plans an assistant."""
  config, model = source.config, source.target.model
  shape = gemma.assistant(config, model.dtype)
  width = config.size('backbone_hidden_size')
  source.refuse_other_target('backbone_hidden_size', width, model.dim)
  source.refuse_other_target('vocab_size', shape.vocab_size, model.vocab_size)
  is_ordered = config.flag('use_ordered_embeddings')
  size = lambda key: config.size(key) if is_ordered else 0
  drafter = drafters.Assistant(
    model=model,
    kv_layers=_kv_layers(config, model),
    num_draft_tokens=source.num_drafts(_num_draft_tokens(source)),
    layer_config=shape,
    num_clusters=size('num_centroids'),
    num_best_clusters=size('centroid_intermediate_top_k'),
  )
  # Its embedding is only read as an unembedding, if none is stored.
  heads = ('lm_head.weight', 'embed_tokens.weight')
  head = next((x for x in heads if x in source.tensors), heads[-1])
  table = _TABLE | {'vocabulary.unembedding': head}
  return source_lib.Plan(drafter, table, ignored={*heads} - {head})


def _kv_layers(config, model):
  """Returns the target's last layers with and without a window.

  Only layers with keys and values of their own count.
  """
  own = model.own_kv_layers
  with_window = [i for i in own if model.window(i) is not None]
  without = [i for i in own if model.window(i) is None]
  if not (with_window and without):
    raise ValueError(
      f'{config.origin}: the drafter reads a layer with a window and one '
      f'without, but the target has {len(with_window)} and {len(without)} of '
      'them: the drafter was made for another target'
    )
  return with_window[-1], without[-1]


def _num_draft_tokens(source):
  path = source.folder / 'generation_config.json'
  if not path.exists():
    return _NUM_DRAFT_TOKENS
  values = files.read_json(path)
  config = config_lib.Config(values, str(path))
  return config.size('num_assistant_tokens', _NUM_DRAFT_TOKENS)
