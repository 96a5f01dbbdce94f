"""The facts that `compile_tpu` finds out about a program."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """One object of compile.json; its figures are per device and per round.

  Arguments and temporaries are those of the decoding loop, whose arguments
  include the caches. The peak is the larger of the loop's and the prefill's. If
  the compiler refuses a program for its memory, these fields say what that
  program would need, as far as it is known, with its results counted among the
  temporaries. A figure that could not be determined is None.
  """

  model: str  # its repr, like the drafter's
  weights: str | None  # 'int8'; None if they are as in the model
  drafter: str
  topology: str
  devices: int
  mesh: dict[str, int]
  batch_size: int
  max_length: int  # prompt and output; the capacity of the caches
  num_draft_tokens: int  # 0: autoregressive decoding
  hbm_bytes_per_device: int
  argument_bytes: int
  temp_bytes: int | None
  peak_bytes: int | None
  fits: bool
  collectives: list[dict[str, Any]] | None = None
  host_transfers: int | None = None
  vocab_all_gathers: int | None = None
  flops_per_round: int | None = None
  bytes_per_round: int | None = None
  # The same, if each conditional takes its cheapest branch.
  least_bytes_per_round: int | None = None
  weight_copies_per_round: int | None = None
  roofline_seconds_per_round: float | None = None
  compile_seconds: float

  def summary(self) -> str:
    """Returns a one-line summary for the terminal."""
    gib = lambda size: f'{(size or 0) / (1 << 30):.2f}'
    if not self.fits:
      least = self.peak_bytes or self.argument_bytes
      return (
        f'{self.topology}: DOES NOT FIT: a device needs at least {gib(least)} '
        f'GiB but has {gib(self.hbm_bytes_per_device)}'
      )
    sums = sum(one['per_round'] for one in self.collectives or ())
    moved = f'{(self.bytes_per_round or 0) / 1e9:.2f} GB moved'
    if self.least_bytes_per_round != self.bytes_per_round:
      gigabytes = (self.least_bytes_per_round or 0) / 1e9
      moved = f'{gigabytes:.2f} GB moved, with every branch {moved}'
    return (
      f'{self.topology}: fits: {gib(self.peak_bytes)} of '
      f'{gib(self.hbm_bytes_per_device)} GiB per device, '
      f'{gib(self.temp_bytes)} temporary; per round: {sums} collectives '
      f'({self.vocab_all_gathers} of a vocabulary), '
      f'{self.host_transfers} host transfers, '
      f'{self.weight_copies_per_round} copies of weights, {moved}, at least '
      f'{1e3 * (self.roofline_seconds_per_round or 0):.2f} ms'
    )
