r"""Writes a trained drafter in the layout of vLLM, SGLang or speculators.

  python -m experiments.export --drafter=smollm2-135m-instruct/eagle3 \
    --layout=huggingface --out=DIR
  python -m experiments.export --drafter=DRAFTER --layout=speculators \
    --target_name=Qwen/Qwen3-8B --out=DIR
  python -m experiments.export --drafter=DRAFTER --layout=huggingface \
    --target=Qwen/Qwen3-8B --out=DIR --upload=owner/name

DRAFTER is what `specsample.load_drafter` takes. If the layout cannot hold a
part of the drafter, the export is refused with the name of that part, before
anything is written. There is nothing to configure; --out holds config.json, the
weights in bfloat16, and a model card, README.md.
"""

# Only the wiring is here: specsample/loading/export.py checks and writes.

from absl import flags

from experiments.command import cli
from experiments.command import environment
from experiments.inspection import inspection
import specsample
from specsample import files
from specsample.loading import card
from specsample.loading import export
from specsample.loading.published import writing

_DRAFTER = flags.DEFINE_string(
  'drafter',
  None,
  'The drafter: a name, a folder or a repository of the hub.',
  required=True,
)
_LAYOUT = flags.DEFINE_enum(
  'layout',
  None,
  writing.LAYOUTS,
  "huggingface for the names that each method's authors use, which vLLM and "
  "SGLang read; speculators for those of vLLM's library of that name.",
  required=True,
)
_OUT = flags.DEFINE_string(
  'out',
  None,
  'The folder to write, which must not exist yet; here or in a bucket (gs://).',
  required=True,
)
_TARGET = flags.DEFINE_string(
  'target', None, "The drafter's target; default what its card names."
)
_TARGET_NAME = flags.DEFINE_string(
  'target_name',
  None,
  "The target's name for others, such as Qwen/Qwen3-8B; default --target.",
)
_UPLOAD = flags.DEFINE_string(
  'upload', None, 'A new repository of the hub to upload to, owner/name.'
)


def main() -> None:
  """Loads, writes and perhaps uploads the drafter."""
  environment.set_up()
  with cli.bad_input():
    name = _TARGET.value or inspection.target_of(card.find(_DRAFTER.value))
    # Bfloat16 is what is written.
    target = specsample.load(name, dtype='bfloat16')
    target_name = _TARGET_NAME.value or export.name_of(target)
    if _UPLOAD.value is not None:
      export.check_upload(_OUT.value, _UPLOAD.value, target_name)
    loaded = specsample.load_drafter(_DRAFTER.value, target)
    specsample.export_drafter(
      _OUT.value,
      loaded.drafter,
      loaded.params,
      target=target,
      layout=_LAYOUT.value,
      target_name=target_name,
      card=loaded.card,
    )
    print(
      f'{type(loaded.drafter).__name__} in the {_LAYOUT.value} layout: '
      f'{files.at(_OUT.value)}'
    )
    if _UPLOAD.value is not None:
      print(export.upload(_OUT.value, _UPLOAD.value))


if __name__ == '__main__':
  cli.run(main)
