"""MessagePack, in which state variables are stored. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

pack: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
unpack: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode
