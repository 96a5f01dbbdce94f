"""TensorBoard's event files, read without TensorFlow."""

import struct

from tensorboardX.proto import event_pb2


def scalars(path):
  """Returns (tag, step, value) of each scalar in an event file.

  A record is a length, its checksum, the event, and the event's checksum.
  """
  data, found = path.read_bytes(), []
  while data:
    (length,) = struct.unpack('<Q', data[:8])
    event = event_pb2.Event.FromString(data[12 : 12 + length])
    found += [
      (value.tag, event.step, value.simple_value)
      for value in event.summary.value
    ]
    data = data[16 + length :]
  return found
