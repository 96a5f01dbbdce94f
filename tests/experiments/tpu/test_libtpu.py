import os
import pathlib
import re

import pytest

from experiments.tpu import libtpu


def test_libtpu_is_found_where_the_command_installs_it(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setenv('TPU_LIBRARY_PATH', '')  # so that it is put back
  with pytest.raises(ValueError, match='is not installed') as error:
    libtpu.find_libtpu()
  (folder,) = re.findall('--target=([^ ]+)', str(error.value))
  library = pathlib.Path(folder) / 'libtpu' / 'libtpu.so'
  library.parent.mkdir(parents=True)
  library.touch()
  libtpu.find_libtpu()
  assert os.environ['TPU_LIBRARY_PATH'] == str(library)
  # Another version of JAX has another folder: libtpu is of its version.
  assert re.fullmatch(r'libtpu-[0-9.]*[0-9]', pathlib.Path(folder).name)
